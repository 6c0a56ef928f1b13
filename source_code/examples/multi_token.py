"""Train a GPT-2 that also predicts the token after the next, from a stage in the middle.

    torchrun --standalone --nproc-per-node=2 source_code/examples/multi_token.py

The second head (DeepSeek-V3, arXiv:2412.19437, section 2.2) is a stage of its own, between the
layers and the first head, and its loss begins there. One matrix is the embedding in stage 0,
embedding and head in stage 2, and head in stage 3. In float64, losses, gradients and parameters are
compared with one process.
"""

import argparse
import sys

import torch
from gpt2 import N_MICROBATCHES, ROWS, SEQ_LEN, VOCAB_SIZE, build_model
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from course_pp import parallel as pp
from course_pp.model import CrossEntropy

CUTS = ["gpt2.transformer.h.4", "second", "gpt2.lm_head"]  # stages 1 to 3 begin here
NAME = "token after the next"
WEIGHT = 0.3
TOLERANCE = 1e-12


class SecondHead(nn.Module):
    """Predicts token t + 2 from the layers' output at token t, and from token t + 1."""

    def __init__(self, embedding: nn.Embedding, block: GPT2Block) -> None:
        super().__init__()
        n_tokens, dim = embedding.weight.shape
        self.embedding = nn.Embedding(n_tokens, dim)
        self.embedding.weight = embedding.weight  # it also serves as the matrix of this head
        self.norm_seen = nn.LayerNorm(dim)
        self.norm_next = nn.LayerNorm(dim)
        self.norm = nn.LayerNorm(dim)
        self.join = nn.Linear(2 * dim, dim)
        self.block = block

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return the mean loss for ``x`` (rows, seq, dim) and ``tokens`` (rows, seq + 2)."""
        following = self.embedding(tokens[:, 1:-1])
        joined = torch.cat([self.norm_seen(x), self.norm_next(following)], -1)
        y = self.norm(self.block(self.join(joined)))
        return WEIGHT * CrossEntropy()(linear(y, self.embedding.weight), tokens[:, 2:])

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return pp.attach_loss(x, self.loss(x, tokens), NAME)


class MultiToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt2 = build_model()
        self.second = SecondHead(self.gpt2.transformer.wte, GPT2Block(self.gpt2.config))

    def layers(self, tokens: Tensor) -> Tensor:
        return self.gpt2.transformer(tokens[:, :-2]).last_hidden_state

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gpt2.lm_head(self.second(self.layers(tokens), tokens))


def batch(step: int) -> Tensor:
    """Return tokens (rows, seq + 2): the inputs, and two more as targets of the two heads."""
    drawn = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB_SIZE, (ROWS, SEQ_LEN + 2), generator=drawn)
    return tokens.to(pp.get_device())


def in_one_process(steps: int) -> tuple[MultiToken, list[tuple[float, float]]]:
    """Return the model after ``steps`` with its last gradients, and both losses of each step."""
    model = MultiToken().double().to(pp.get_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        tokens = batch(step)
        optimizer.zero_grad()
        x = model.layers(tokens)
        first = CrossEntropy()(model.gpt2.lm_head(x), tokens[:, 1:-1])
        second = model.second.loss(x, tokens)
        (first + second).backward()
        optimizer.step()
        losses.append((first.item(), second.item()))
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--schedule", default="interleaved_1f1b", help="a schedule of four stages; on 4 ranks: 1f1b"
    )
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    rank, _, n_ranks = pp.get_world_info()
    mesh = pp.init_distributed(pp.DistributedConfig(pp=n_ranks))
    device = pp.get_device()
    example = batch(0)[: ROWS // N_MICROBATCHES]
    parts = pp.auto_split(MultiToken().double().to(device), example, n_stages=4, at=CUTS)
    stages = []
    for i in pp.get_stage_indices(args.schedule, rank, n_ranks, len(parts) // n_ranks):
        stage = pp.build_pipeline_stage(
            parts[i], mesh, device, stage=i, n_stages=len(parts), inputs=example
        )
        stages.append(stage)
    pipeline = pp.build_pipeline_schedule(stages, N_MICROBATCHES, CrossEntropy(), args.schedule)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    expected, losses = in_one_process(args.steps)
    furthest = 0.0
    for step in range(args.steps):
        tokens = batch(step)
        optimizer.zero_grad()
        first = pipeline.step(tokens, target=tokens[:, 1:-1]).item()
        second = pipeline.attached[NAME]
        optimizer.step()
        furthest = max(furthest, abs(first - losses[step][0]), abs(second - losses[step][1]))
        print(f"rank {rank}, step {step + 1}: loss {first:.4f} and {second:.4f} for the {NAME}")
    for module in pipeline.modules:
        for name, p in module.named_parameters():
            one = expected.get_parameter(name)
            furthest = max(furthest, (p - one).abs().max().item())
            furthest = max(furthest, (p.grad - one.grad).abs().max().item())
    same = "equal to" if furthest <= TOLERANCE else "DIFFER FROM"
    compared = f"losses, gradients and parameters {same} one process: {furthest:.0e}"
    print(f"rank {rank}: {compared}; tied: {pipeline.ties}")
    pp.destroy_distributed()
    sys.exit(furthest > TOLERANCE)


if __name__ == "__main__":
    with pp.refusals_said_once("multi_token.py"):
        main()
