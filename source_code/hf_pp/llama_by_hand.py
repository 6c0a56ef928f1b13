"""Cut a Hugging Face Llama by hand, train it through the pipeline written by hand, compare with one
process.

    torchrun --standalone --nproc-per-node=2 source_code/hf_pp/llama_by_hand.py --schedule 1f1b

A small Llama with random weights, so nothing is downloaded. Any number of ranks up to the number of
layers works, one included. Everything is in float64, so that equal means equal. Needs transformers:
pip install 'course_pp[hf]'.
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
STEPS, N_MICROBATCHES, BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 3, 8, 16, 32, 256
SEED, LEARNING_RATE = 42, 0.3
# transformers' norms round to float32, which can make more of a difference in the last digit
TOLERANCE = 1e-10


def build_llama(n_layers: int) -> LlamaForCausalLM:
    """The whole model, the same on every rank. One that fits on no rank is cut on the meta device, then loaded."""
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
    """One stage, cut out of a whole Llama in place: what other stages hold is dropped, the rest
    keeps its names.

    The first stage takes token ids (batch, seq), the others hidden states (batch, seq, dim); the
    last gives logits (batch, seq, vocab), the others hidden states.
    """

    def __init__(self, llama: LlamaForCausalLM, layers: range, link: Link) -> None:
        super().__init__()
        self.model, self.lm_head = llama.model, llama.lm_head
        # A dict, because in a list the stage's first layer would be called "0" on every rank.
        self.model.layers = nn.ModuleDict({str(i): self.model.layers[i] for i in layers})
        if not link.is_first:
            self.model.embed_tokens = None
        if not link.is_last:
            self.model.norm = self.lm_head = None

    def forward(self, x: Tensor) -> Tensor:
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        # The rotary angles depend on positions alone: cheaper computed in every stage than sent.
        positions = torch.arange(x.shape[1], device=x.device)[None]
        angles = self.model.rotary_emb(x, position_ids=positions)
        for layer in self.model.layers.values():
            x = layer(x, position_ids=positions, position_embeddings=angles)
        return x if self.lm_head is None else self.lm_head(self.model.norm(x))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of a microbatch; all microbatches have as many, so their mean is the batch's."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def random_batch() -> tuple[Tensor, Tensor]:
    """Token ids and the next ones, each (batch, seq), the same on every rank."""
    tokens = torch.randint(
        VOCAB_SIZE, (BATCH_SIZE, SEQ_LEN + 1), generator=torch.Generator().manual_seed(SEED)
    )
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
    llama, device = build_llama(args.layers), get_device()
    link = Link(
        (BATCH_SIZE // N_MICROBATCHES, SEQ_LEN, llama.config.hidden_size), torch.float64, device
    )
    stage = LlamaStage(llama, layers, link).to(device)
    optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)

    microbatches, targets = (part.to(device).chunk(N_MICROBATCHES) for part in random_batch())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_microbatches = SCHEDULES[args.schedule](
            stage, microbatches, targets, cross_entropy, link
        )
        optimizer.step()
        losses += [torch.stack(of_microbatches).mean().item()] if link.is_last else []

    parts: list[tuple[list[float], dict[str, Tensor]]] = [([], {})] * n_ranks
    dist.all_gather_object(parts, (losses, gradients_of(stage)))
    destroy_distributed()
    if rank == 0:
        gradients = {name: gradient for _, part in parts for name, gradient in part.items()}
        print(
            f"{args.schedule} on {n_ranks} ranks: losses"
            f" {[round(loss, 4) for loss in parts[-1][0]]}"
        )
        compare_with_one_process(args.layers, parts[-1][0], gradients)


def compare_with_one_process(
    n_layers: int, losses: list[float], gradients: dict[str, Tensor]
) -> None:
    """Train the whole model on the whole batch with transformers' own forward; exit with 1 if anything differs."""
    llama, (inputs, targets) = build_llama(n_layers), random_batch()
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
    print(
        f"{'equal to' if equal else 'DIFFERS FROM'} one process: {STEPS} losses to"
        f" {furthest_loss:.0e}, ",
        end="",
    )
    print(f"all {len(expected)} gradients of the last step to {furthest:.0e} (float64)")
    if not equal:
        sys.exit(1)


if __name__ == "__main__":
    with refusals_said_once("llama_by_hand.py"):
        main()
