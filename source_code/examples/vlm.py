"""Train a model that reads images and text through a pipeline: an encoder and an adapter before the
GPT-2 of gpt2.py.

    torchrun --standalone --nproc-per-node=2 source_code/examples/vlm.py --thaw-at 2 --folder
    runs/vlm

Rows have different lengths and numbers of images, so a step gets ready-made microbatches. The
encoder, on the first stage, is frozen until --thaw-at steps are done. The same command with more
--steps resumes, on either side of the thaw. Losses, gradients and parameters are compared, in
float64, with one process that never stopped.
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

ROWS, N_MICROBATCHES, PATCHES, DIM, TOLERANCE = 12, 4, 4, 16, 1e-12
IMAGE, PAD = 0, 1  # a token that stands for a patch of an image; one that fills a row up
# tokens (n,), and images (n_images, 3, 8, 8) for the IMAGE tokens among them
Row = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    """A small ViT: images (n, 3, 8, 8) to features (n, PATCHES, DIM)."""

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
        self.decoder = build_model()  # which sets the seed
        self.encoder, self.adapter = Encoder(), nn.Linear(DIM, self.decoder.config.n_embd)

    def forward(self, tokens: Tensor, images: Tensor) -> Tensor:
        x, features = self.decoder.transformer.wte(tokens), self.adapter(self.encoder(images))
        x = x.masked_scatter((tokens == IMAGE)[..., None], features)  # in order, row after row
        return self.decoder(inputs_embeds=x).logits


def set_encoder(module: nn.Module, trains: bool) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trains or not name.startswith("encoder."))


def rows(step: int, most_images: int) -> list[Row]:
    """A batch: text with up to ``most_images`` images after its first token."""
    drawn, found = torch.Generator().manual_seed(step), []
    for _ in range(ROWS):
        n_images = int(torch.randint(most_images + 1, (), generator=drawn))
        text = torch.randint(
            PAD + 1, VOCAB_SIZE, (int(torch.randint(3, 9, (), generator=drawn)),), generator=drawn
        )
        images = torch.randn(n_images, 3, 8, 8, generator=drawn, dtype=torch.float64)
        found.append(
            (torch.cat([text[:1], torch.full((n_images * PATCHES,), IMAGE), text[1:]]), images)
        )
    return found


def microbatches(batch: list[Row]) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """What the first stage takes for each microbatch, and what the loss takes."""
    for i, (tokens, images) in enumerate(batch):
        what = f"row {i} has {len(images)} images of {PATCHES} patches"
        if (slots := int((tokens == IMAGE).sum())) != len(images) * PATCHES:
            raise ValueError(f"{what}, and {slots} tokens for them: give one for each patch")
        if len(tokens) > SEQ_LEN:
            raise ValueError(
                f"{what}, {len(tokens)} tokens with its text, but {SEQ_LEN} fit: give it fewer"
                " images"
            )
    arguments, targets = [], []
    for start in range(0, ROWS, ROWS // N_MICROBATCHES):
        texts, images = zip(*batch[start : start + ROWS // N_MICROBATCHES], strict=True)
        tokens = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)
        after = nn.functional.pad(tokens[:, 1:], (0, 1), value=PAD)
        arguments.append((tokens.to(pp.get_device()), torch.cat(images).to(pp.get_device())))
        after = after.masked_fill(after <= PAD, CrossEntropy.ignore_index)  # nobody predicts images
        targets.append(after.to(pp.get_device()))
    return arguments, targets


def in_one_process(args: argparse.Namespace) -> tuple[VisionLanguage, list[float]]:
    """The model after all steps, with the last one's gradients, and the loss of each."""
    model, losses, loss_fn = VisionLanguage().double().to(pp.get_device()), [], CrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        set_encoder(model, step >= args.thaw_at)
        optimizer.zero_grad()
        arguments, targets = microbatches(rows(step, args.most_images))
        total = sum(
            loss_fn.total(model(*each), target)
            for each, target in zip(arguments, targets, strict=True)
        )
        (loss := total / sum(map(loss_fn.count, targets))).backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"steps": 4, "thaw-at": 2, "most-images": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="where checkpoints are saved, and found")
    args = parser.parse_args()
    rank, _, n_ranks = pp.get_world_info()
    mesh, device = pp.init_distributed(pp.DistributedConfig(pp=n_ranks)), pp.get_device()
    # The microbatch that stages are built for has an image a row, those of a step any number.
    one_image = torch.full((PATCHES,), IMAGE), torch.zeros(1, 3, 8, 8, dtype=torch.float64)
    (example, *_), _ = microbatches([one_image] * ROWS)
    cuts = [
        f"decoder.transformer.h.{first}" for first, _ in pp.compute_layer_assignment(8, n_ranks)[1:]
    ]
    module = pp.auto_split(
        VisionLanguage().double().to(device), example, n_stages=n_ranks, at=cuts
    )[rank]
    stage = pp.build_pipeline_stage(module, mesh, device, inputs=example)
    pipeline = pp.build_pipeline_schedule(stage, N_MICROBATCHES, CrossEntropy(), "1f1b")
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    start, losses = 0, []
    if args.folder and (loaded := resume(args.folder, module, optimizer, device_mesh=mesh)):
        start, earlier = loaded.step, loaded.extra["thaw_at"]
        # the encoder was trained in other steps
        if min(args.thaw_at, start) != min(earlier, start):
            was, remedy = (
                (f"frozen until {earlier}", earlier)
                if earlier < start
                else ("frozen", f"{start} or more")
            )
            past = f"but up to the checkpoint's step {start} the encoder was {was}"
            raise ValueError(
                f"--thaw-at is {args.thaw_at}, {past}: give {remedy}, or another folder"
            )
    for step in range(start, args.steps):
        set_encoder(module, step >= args.thaw_at)
        arguments, targets = Ranks().collectively(
            lambda step=step: microbatches(rows(step, args.most_images))
        )
        optimizer.zero_grad()
        losses.append(pipeline.step(arg_mbs=arguments, target_mbs=targets).item())
        optimizer.step()
        print(
            f"rank {rank}, step {step + 1}: loss"
            f" {losses[-1]:.4f}{', encoder frozen' * (step < args.thaw_at)}"
        )
    if args.folder and losses:
        save(
            args.folder,
            args.steps,
            module,
            optimizer,
            device_mesh=mesh,
            extra={"thaw_at": args.thaw_at},
        )
    expected, all_losses = in_one_process(args)
    furthest = max(
        (abs(ours - one) for ours, one in zip(losses, all_losses[start:], strict=True)), default=0.0
    )
    for name, p in module.named_parameters():
        one = expected.get_parameter(name)
        pairs = [(p, one)] if p.grad is None else [(p, one), (p.grad, one.grad)]
        furthest = max(furthest, *((ours - theirs).abs().max().item() for ours, theirs in pairs))
    same = "equal to" if furthest <= TOLERANCE else "DIFFER FROM"
    print(f"rank {rank}: losses, gradients and parameters {same} one process: {furthest:.0e}")
    pp.destroy_distributed()
    sys.exit(furthest > TOLERANCE)


if __name__ == "__main__":
    with pp.refusals_said_once("vlm.py"):
        main()
