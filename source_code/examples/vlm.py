"""Train a model that reads images and text: an encoder and an adapter before the GPT-2 of gpt2.py.

    torchrun --standalone --nproc-per-node=2 source_code/examples/vlm.py --thaw-at 2

Rows have different lengths and numbers of images, so a step gets ready-made microbatches. The
encoder lies on the first stage, and is frozen until --thaw-at steps are done. With --folder, the
same command with more --steps resumes, on either side of the thaw. Losses, gradients and parameters
are compared, in float64, with one process that never stopped.
"""

import argparse
import sys

import torch
from gpt2 import SEQ_LEN, VOCAB_SIZE, build_model
from torch import Tensor, nn

from course_pp import parallel as pp
from course_pp.base.ranks import Ranks
from course_pp.model import CrossEntropy
from course_pp.training.checkpoint import resume, save

ROWS = 12
N_MICROBATCHES = 4
PATCHES = 4
DIM = 16
TOLERANCE = 1e-12
IMAGE = 0  # token that stands for a patch of an image
PAD = 1  # token that fills a row up
Row = tuple[Tensor, Tensor]  # tokens (n,), images (n_images, 3, 8, 8)


class Encoder(nn.Module):
    """A small ViT: it turns images (n, 3, 8, 8) into features (n, PATCHES, DIM)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, kernel_size=4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(PATCHES, DIM))
        layer = nn.TransformerEncoderLayer(
            DIM, 2, 2 * DIM, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(self.patches(images).flatten(2).mT + self.positions)


class VisionLanguage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = build_model()  # first, because it sets the seed
        self.encoder = Encoder()
        self.adapter = nn.Linear(DIM, self.decoder.config.n_embd)

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        x = self.decoder.transformer.wte(tokens)
        features = self.adapter(self.encoder(images))
        # Features take the places of IMAGE tokens in order, row after row.
        x = x.masked_scatter((tokens == IMAGE)[..., None], features)
        return self.decoder(inputs_embeds=x).logits


def set_encoder(module: nn.Module, trains: bool) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trains or not name.startswith("encoder."))


def rows(step: int, most_images: int) -> list[Row]:
    """Return a batch: text with up to ``most_images`` images after its first token."""
    drawn = torch.Generator().manual_seed(step)
    found = []
    for _ in range(ROWS):
        n_images = int(torch.randint(most_images + 1, (), generator=drawn))
        n_tokens = int(torch.randint(3, 9, (), generator=drawn))
        text = torch.randint(PAD + 1, VOCAB_SIZE, (n_tokens,), generator=drawn)
        images = torch.randn(n_images, 3, 8, 8, generator=drawn, dtype=torch.float64)
        slots = torch.full((n_images * PATCHES,), IMAGE)
        found.append((torch.cat([text[:1], slots, text[1:]]), images))
    return found


def microbatches(batch: list[Row]) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Return the arguments of the first stage and the targets, one of each for a microbatch."""
    device = pp.get_device()
    for i, (tokens, images) in enumerate(batch):
        row = f"row {i} has {len(images)} images of {PATCHES} patches"
        if (slots := int((tokens == IMAGE).sum())) != len(images) * PATCHES:
            raise ValueError(f"{row}, and {slots} tokens for them: give one for each patch")
        if (n := len(tokens)) > SEQ_LEN:
            raise ValueError(
                f"{row}, {n} tokens with its text, but {SEQ_LEN} fit: give it fewer images"
            )
    arguments = []
    targets = []
    for start in range(0, ROWS, ROWS // N_MICROBATCHES):
        texts, images = zip(*batch[start : start + ROWS // N_MICROBATCHES], strict=True)
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)
        arguments.append((tokens.to(device), torch.cat(images).to(device)))
        after = nn.functional.pad(tokens[:, 1:], (0, 1), value=PAD)
        # The model is not trained to predict images or padding.
        targets.append(after.masked_fill(after <= PAD, CrossEntropy.ignore_index).to(device))
    return arguments, targets


def in_one_process(args: argparse.Namespace) -> tuple[VisionLanguage, list[float]]:
    """Return the model after all steps with its last gradients, and the loss of each step."""
    model = VisionLanguage().double().to(pp.get_device())
    loss_fn = CrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(args.steps):
        set_encoder(model, step >= args.thaw_at)
        optimizer.zero_grad()
        arguments, targets = microbatches(rows(step, args.most_images))
        # Microbatches have different numbers of tokens, so the mean is over all of them at once.
        total = 0.0
        for each, target in zip(arguments, targets, strict=True):
            total += loss_fn.total(model(*each), target)
        loss = total / sum(map(loss_fn.count, targets))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def refuse_another_thaw(thaw_at: int, earlier: int, start: int) -> None:
    """Raise ValueError if the encoder was frozen in other steps before step ``start``."""
    if min(thaw_at, start) == min(earlier, start):
        return
    was, remedy = "frozen", f"{start} or more"
    if earlier < start:
        was, remedy = f"frozen until {earlier}", earlier
    past = f"up to the checkpoint's step {start} the encoder was {was}"
    raise ValueError(f"--thaw-at is {thaw_at}, but {past}: give {remedy}, or another folder")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--thaw-at", type=int, default=2)
    parser.add_argument("--most-images", type=int, default=2)
    parser.add_argument("--folder", help="where checkpoints are saved, and found")
    args = parser.parse_args()

    rank, _, n_ranks = pp.get_world_info()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=n_ranks))
    device = pp.get_device()
    # The example has one image a row. A real microbatch may have any number.
    one_image = torch.full((PATCHES,), IMAGE), torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    (example, *_), _ = microbatches([one_image] * ROWS)
    ranges = pp.compute_layer_assignment(8, n_ranks)
    cuts = [f"decoder.transformer.h.{first}" for first, _ in ranges[1:]]
    model = VisionLanguage().double().to(device)
    module = pp.auto_split(model, example, n_stages=n_ranks, at=cuts)[rank]
    stage = pp.build_pipeline_stage(module, mesh, device, inputs=example)
    pipeline = pp.build_pipeline_schedule(stage, N_MICROBATCHES, CrossEntropy(), "1f1b")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    start = 0
    if args.folder and (loaded := resume(args.folder, module, optimizer, device_mesh=mesh)):
        start = loaded.step
        refuse_another_thaw(args.thaw_at, loaded.extra["thaw_at"], start)

    losses = []
    for step in range(start, args.steps):
        set_encoder(module, step >= args.thaw_at)
        # If a rank refuses its batch, all of them stop, and none waits for it.
        arguments, targets = Ranks().collectively(
            lambda step=step: microbatches(rows(step, args.most_images))
        )
        optimizer.zero_grad()
        losses.append(pipeline.step(arg_mbs=arguments, target_mbs=targets).item())
        optimizer.step()
        frozen = ", encoder frozen" if step < args.thaw_at else ""
        print(f"rank {rank}, step {step + 1}: loss {losses[-1]:.4f}{frozen}")
    if args.folder and losses:
        extra = {"thaw_at": args.thaw_at}
        save(args.folder, args.steps, module, optimizer, device_mesh=mesh, extra=extra)

    expected, all_losses = in_one_process(args)
    furthest = 0.0
    for ours, one in zip(losses, all_losses[start:], strict=True):
        furthest = max(furthest, abs(ours - one))
    for name, p in module.named_parameters():
        one = expected.get_parameter(name)
        furthest = max(furthest, (p - one).abs().max().item())
        if p.grad is not None:
            furthest = max(furthest, (p.grad - one.grad).abs().max().item())
    same = "equal to" if furthest <= TOLERANCE else "DIFFER FROM"
    print(f"rank {rank}: losses, gradients and parameters {same} one process: {furthest:.0e}")
    pp.destroy_distributed()
    sys.exit(furthest > TOLERANCE)


if __name__ == "__main__":
    with pp.refusals_said_once("vlm.py"):
        main()
