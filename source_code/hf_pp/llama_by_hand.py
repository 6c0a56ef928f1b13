"""Cut a Hugging Face Llama by hand, train it in a pipeline by hand, compare with one process.

    torchrun --standalone --nproc-per-node=2 source_code/hf_pp/llama_by_hand.py --schedule 1f1b

The Llama is small and has random weights, so nothing is downloaded. It runs on one rank or more, up
to the number of layers. All numbers are float64, so that equal means equal. The script needs
transformers: pip install 'course_pp[hf]'.
"""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from course_pp.parallel import (
    DistributedConfig,
    destroy_distributed,
    get_device,
    get_world_info,
    init_distributed,
    refusals_said_once,
)
from course_pp.runtime.by_hand import (
    Link,
    get_stage_layers,
    train_step_pipeline_1f1b,
    train_step_pipeline_gpipe,
)

SCHEDULES = {"gpipe": train_step_pipeline_gpipe, "1f1b": train_step_pipeline_1f1b}
STEPS = 3
N_MICROBATCHES = 8
BATCH_SIZE = 16
SEQ_LEN = 32
VOCAB_SIZE = 256
SEED = 42
LEARNING_RATE = 0.3
TOLERANCE = 1e-10  # the norms of transformers round to float32, which enlarges a tiny difference


def build_llama(n_layers: int) -> LlamaForCausalLM:
    """Return the whole model, the same on every rank.

    A model that fits on no rank is cut on the meta device and loaded then.
    """
    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=False,
        attn_implementation="sdpa",  # causal when given no mask
    )
    return LlamaForCausalLM(config).double()


class LlamaStage(nn.Module):
    """One stage, cut out of a whole Llama in place. Its parameters keep their names.

    The first stage takes token ids (batch, seq), the others take hidden states (batch, seq, dim).
    The last stage gives logits (batch, seq, vocab), the others give hidden states.
    """

    def __init__(self, llama: LlamaForCausalLM, layers: range, link: Link) -> None:
        super().__init__()
        self.model = llama.model
        self.lm_head = llama.lm_head
        # In a list, the first layer of every stage would be called "0".
        self.model.layers = nn.ModuleDict({str(i): self.model.layers[i] for i in layers})
        if not link.is_first:
            self.model.embed_tokens = None
        if not link.is_last:
            self.model.norm = self.lm_head = None

    def forward(self, x: Tensor) -> Tensor:
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        # The rotary angles are cheaper to compute in every stage than to send.
        positions = torch.arange(x.shape[1], device=x.device)[None]
        angles = self.model.rotary_emb(x, position_ids=positions)
        for layer in self.model.layers.values():
            x = layer(x, position_ids=positions, position_embeddings=angles)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the tokens of a microbatch.

    All microbatches have the same number of tokens, so the mean of their losses is the batch's.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_batch() -> tuple[Tensor, Tensor]:
    """Return token ids and the ids that follow, each (batch, seq), the same on every rank."""
    drawn = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN + 1), generator=drawn)
    return tokens[:, :-1], tokens[:, 1:]


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.cpu() for name, p in module.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedule", choices=SCHEDULES, default="1f1b", help="order of the step (default 1f1b)"
    )
    parser.add_argument(
        "--layers", type=int, default=7, help="decoder layers, at least one a rank (default 7)"
    )
    args = parser.parse_args()

    rank, _, n_ranks = get_world_info()
    layers = get_stage_layers(args.layers, n_ranks, rank)
    init_distributed(DistributedConfig(pp=n_ranks), SEED)
    device = get_device()
    llama = build_llama(args.layers)
    shape = (BATCH_SIZE // N_MICROBATCHES, SEQ_LEN, llama.config.hidden_size)
    link = Link(shape, torch.float64, device)
    stage = LlamaStage(llama, layers, link).to(device)
    optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)

    inputs, targets = random_batch()
    microbatches = inputs.to(device).chunk(N_MICROBATCHES)
    targets = targets.to(device).chunk(N_MICROBATCHES)
    train_step = SCHEDULES[args.schedule]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_microbatches = train_step(stage, microbatches, targets, cross_entropy, link)
        optimizer.step()
        if link.is_last:
            losses.append(torch.stack(of_microbatches).mean().item())

    parts: list[tuple[list[float], dict[str, Tensor]]] = [([], {})] * n_ranks
    dist.all_gather_object(parts, (losses, gradients_of(stage)))
    destroy_distributed()
    if rank == 0:
        gradients = {}
        for _, part in parts:
            gradients |= part
        losses, _ = parts[-1]
        rounded = [round(loss, 4) for loss in losses]
        print(f"{args.schedule} on {n_ranks} ranks: losses {rounded}")
        compare_with_one_process(args.layers, losses, gradients)


def compare_with_one_process(
    n_layers: int, losses: list[float], gradients: dict[str, Tensor]
) -> None:
    """Train the whole model with the forward of transformers; exit with 1 if anything differs."""
    llama = build_llama(n_layers)
    inputs, targets = random_batch()
    optimizer = torch.optim.SGD(llama.parameters(), lr=LEARNING_RATE)
    furthest_loss = 0.0
    for pipeline_loss in losses:
        optimizer.zero_grad()
        loss = cross_entropy(llama(inputs).logits, targets)
        loss.backward()
        optimizer.step()
        furthest_loss = max(furthest_loss, abs(loss.item() - pipeline_loss))
    expected = gradients_of(llama)
    furthest = max((gradients[name] - value).abs().max().item() for name, value in expected.items())
    equal = gradients.keys() == expected.keys() and max(furthest_loss, furthest) <= TOLERANCE
    verdict = "equal to" if equal else "DIFFERS FROM"
    print(
        f"{verdict} one process: {STEPS} losses to {furthest_loss:.0e}, all {len(expected)}"
        f" gradients of the last step to {furthest:.0e} (float64)"
    )
    if not equal:
        sys.exit(1)


if __name__ == "__main__":
    with refusals_said_once("llama_by_hand.py"):
        main()
