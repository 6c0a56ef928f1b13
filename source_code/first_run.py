"""Train ten steps on real text through a pipeline, compare with one process, draw the last step.

    torchrun --standalone --nproc-per-node=2 source_code/first_run.py

`make run` calls this. All numbers are float64, so that equal means equal.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from course_pp import show
from course_pp.model import CrossEntropy, ModelConfig, Transformer, build_stage_module
from course_pp.parallel import (
    DistributedConfig,
    build_pipeline_schedule,
    build_pipeline_stage,
    destroy_distributed,
    get_device,
    get_world_info,
    init_distributed,
    refusals_said_once,
)
from course_pp.runtime import Recorder
from course_pp.training.data import Batches, encode, load_corpus, packed, train_tokenizer

STEPS = 10
N_MICROBATCHES = 8
BATCH_SIZE = 16
SEQ_LEN = 64
LEARNING_RATE = 2e-3
SCHEDULE = "1f1b"
SEED = 42
TOLERANCE = 1e-11
PICTURE = Path("runs/first_run.svg")


def train_one_process(
    config: ModelConfig, batches: Batches
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of the whole model, trained on each batch in one piece."""
    torch.manual_seed(SEED)
    model = Transformer(config).double()
    loss_fn = CrossEntropy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model(batches[step].inputs), batches[step].targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def main() -> None:
    rank, _, n_ranks = get_world_info()
    if rank == 0:
        print(f"reading text, building a model of 8 layers on {n_ranks} ranks ...", flush=True)
    train, _ = load_corpus().split()
    tokenizer = train_tokenizer(train)
    batches = Batches(packed(encode(train, tokenizer), SEQ_LEN), BATCH_SIZE, SEED)
    config = ModelConfig(
        dim=128, n_layers=8, n_heads=4, vocab_size=tokenizer.vocab_size, max_seq_len=SEQ_LEN
    )

    mesh = init_distributed(DistributedConfig(pp=n_ranks), SEED)
    device = get_device()
    module = build_stage_module(config, rank, n_ranks).to(device, torch.float64)
    rows = BATCH_SIZE // N_MICROBATCHES
    stage = build_pipeline_stage(module, mesh, device, rows, SEQ_LEN, torch.float64)
    pipeline = build_pipeline_schedule(stage, N_MICROBATCHES, CrossEntropy(), SCHEDULE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)

    losses = []
    recorder = Recorder()
    for step in range(STEPS):
        inputs = batches[step].inputs.to(device)
        targets = batches[step].targets.to(device)
        recorder.clear()
        optimizer.zero_grad()
        with recorder.attach(stage):
            loss = pipeline.step(inputs, target=targets)
        optimizer.step()
        losses.append(loss.item())
        if rank == 0:
            print(f"step {step + 1:2}  loss {losses[-1]:.6f}", flush=True)

    timeline = recorder.timeline()  # a collective: every rank takes part
    mine = {name: value.cpu() for name, value in module.state_dict().items()}
    parts = [None] * n_ranks
    dist.all_gather_object(parts, mine)
    destroy_distributed()
    if rank == 0:
        report(config, batches, losses, parts)
        PICTURE.parent.mkdir(exist_ok=True)
        figure = show.timeline(timeline)
        figure.save(PICTURE)
        print(f"timeline of the last step: {PICTURE}\n  {figure.alt_text}")


def report(
    config: ModelConfig, batches: Batches, losses: list[float], parts: list[dict[str, torch.Tensor]]
) -> None:
    """Compare with one process; exit with 1 if anything differs."""
    expected_losses, expected = train_one_process(config, batches)
    trained = {}
    for part in parts:
        trained |= part
    off = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    furthest = max((trained[name] - value).abs().max().item() for name, value in expected.items())
    equal = trained.keys() == expected.keys() and max(off, furthest) <= TOLERANCE
    verdict = "equal to" if equal else "DIFFERS FROM"
    print(
        f"{verdict} one process: losses to {off:.0e}, all {len(expected)} parameter tensors to"
        f" {furthest:.0e} (float64)"
    )
    if not equal:
        sys.exit(1)


if __name__ == "__main__":
    with refusals_said_once("first_run.py"):
        main()
