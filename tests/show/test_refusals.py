"""What no picture can be made of is refused in words that say what to give."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from course_pp import show
from course_pp.model import ModelConfig
from course_pp.plan import Layout, cluster_of, model_named, predict
from course_pp.schedule import Costs, Timeline, build, ledger, simulate
from tests.schedule.layouts import gpipe, naive

F1B = simulate(build("1f1b", 2, 4))
RAN = replace(F1B, measured=True)
CONFIG = ModelConfig(dim=8, n_layers=12, n_heads=2, vocab_size=16)
SECONDS = naive(2, unit="s")
MEMORY = SimpleNamespace(curves={"activation": ((0.0, 1),)})
odd: Any = "0F0"


def wait(rank: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, operation="recv", peers=(1,))


def piece(*sizes: int) -> SimpleNamespace:
    return SimpleNamespace(offsets=(0,) * len(sizes), sizes=sizes, rank=0)


def planned(layout: Layout, cluster: str) -> Any:
    return predict(model_named("gpt-1t"), layout, cluster_of(cluster), 128, 64)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a name to draw": (lambda: show.timeline(odd), "tl is '0F0'"),
    "an action that is not there": (
        lambda: show.dependencies(gpipe(2, 3), "2F0"),
        "2F0 is not",
    ),
    "an action that is none": (lambda: show.dependencies(gpipe(2, 3), "F0"), "cannot read"),
    "other ranks": (lambda: show.compare(gpipe(4, 8), gpipe(2, 8)), "4 ranks"),
    "seconds first": (lambda: show.compare(SECONDS, gpipe(2, 1)), "seconds"),
    "no work": (lambda: show.compare(Timeline(2, ()), SECONDS), "no work"),
    "memory of other ranks": (
        lambda: show.memory(F1B, measured=[MEMORY]),
        "1 ranks",
    ),
    "an unknown kind": (
        lambda: show.memory(F1B, kind="weights"),
        "kind 'weights'",
    ),
    "two memories": (
        lambda: show.memory(F1B, Costs(), measured=[MEMORY] * 2),
        "costs",
    ),
    "no updates": (
        lambda: show.versions(F1B, ledger(build("pipedream", 2, 4), "stash")),
        r"has no updates \(U\)",
    ),
    "an unknown schedule": (lambda: show.pareto(schedules=["gpipe", "1f2b"]), "1f2b"),
    "costs of stages": (
        lambda: show.pareto(costs=Costs(activation=(1, 1, 1, 2))),
        "activation",
    ),
    "no ranks to speed up": (lambda: show.speed_up(ranks=(0, 2)), "ranks is 0"),
    "ranks not allowed": (lambda: show.speed_up("dualpipe_v", (64,), 16), "dualpipe_v"),
    "measured, not drawn": (lambda: show.speed_up("zb_h1", measured=[RAN]), "not drawn"),
    "no bytes": (lambda: show.bytes_by_kind({}), "no bytes"),
    "bytes below nothing": (
        lambda: show.bytes_by_kind({"weights": -1}),
        "weights of -1",
    ),
    "a budget below nothing": (
        lambda: show.bytes_by_kind({"weights": 1}, -1),
        "budget of -1",
    ),
    "numbers and mappings": (
        lambda: show.bytes_by_kind({"weights": 1, "rank 0": {"weights": 1}}),
        "give all as",
    ),
    "too many kinds": (
        lambda: show.bytes_by_kind({f"kind {i}": 1 for i in range(9)}),
        "sum the small ones",
    ),
    "no waits": (lambda: show.waits([]), "give one for each rank"),
    "two waits of one rank": (lambda: show.waits([wait(0), wait(0)]), "give one for each rank"),
    "no pieces": (lambda: show.pieces({"up": []}), "no pieces"),
    "pieces and checkpoints": (
        lambda: show.pieces({"up": [piece(1)], "PP 4": {"up": [piece(1)]}}),
        "mixed",
    ),
    "pieces of two shapes": (
        lambda: show.pieces({"up": [piece(1, 1), piece(1)]}),
        "1 and 2 dimensions",
    ),
    "one rank alone": (lambda: show.message(n_ranks=1), "n_ranks is 1"),
    "a message to oneself": (lambda: show.message(sender=1), "give another rank"),
    "a step too many": (lambda: show.ring(4, step=7), "steps 1 to 6"),
    "a layer left out": (
        lambda: show.cut(CONFIG, [(0, 6), (7, 12)], tokens=1),
        "12 layers",
    ),
    "too many calls": (
        lambda: show.carried(SimpleNamespace(calls=("a",) * 25, begins=(), values=())),
        "calls of cut is 25",
    ),
    "a size that does not divide": (
        lambda: show.tensor_cut(3),
        "hidden is 256",
    ),
    "a dimension of nothing": (lambda: show.mesh({"pp": 0}), "pp is 0"),
    "nodes that are not full": (
        lambda: show.mesh({"pp": 3, "tp": 4}),
        "12 ranks do not fill",
    ),
    "three of four shards": (lambda: show.fsdp_step(3), "reshard is 3"),
    "two stages a rank": (
        lambda: show.fsdp_step(True, schedule=build("zb_v", 2, 4)),
        "several stages",
    ),
    "a number in a pipeline": (
        lambda: show.fsdp_step(2, schedule=build("1f1b", 2, 4)),
        "without a pipeline",
    ),
    "one rank in a table": (
        lambda: show.parallelisms(CONFIG, 1, 256),
        "n_ranks is 1",
    ),
    "a rank not in the plan": (
        lambda: show.plan(planned(Layout(4, 8), "4x8xA100"), rank=32),
        "rank is 32",
    ),
    "a notebook that is none": (lambda: show.course_map("99"), "here is '99'"),
    "nothing to play": (lambda: show.play(Timeline(2, ())), "0 spans"),
    "a page by another name": (
        lambda: show.play(F1B).save(Path("moves.gif")),
        r"end the name in \.html",
    ),
    "a picture by another name": (
        lambda: show.timeline(F1B).save("a.pdf"),
        r"end the name in \.png or \.svg",
    ),
    "too narrow": (lambda: show.timeline_text(F1B, width=20), "at least 40"),
    "a level that is none": (lambda: show.board(13), "level is 13"),
    "a level of other sizes": (lambda: show.board(1, n_ranks=3), "own sizes"),
    "too large a board": (
        lambda: show.board(n_ranks=8, n_microbatches=64),
        "600",
    ),
    "a board of no ranks": (lambda: show.board(n_ranks=0), "give every rank"),
    "a rank without stages": (
        lambda: show.board(placement=(0, 2)),
        r"placement is \(0, 2\): give every rank",
    ),
    "too low a cap": (
        lambda: show.board(placement=(0, 1, 1, 0), memory_limit=1),
        "memory_limit is 1 on rank 0",
    ),
    "too many caps": (
        lambda: show.board(memory_limit=(1, 1, 1)),
        "memory_limit has 3 values for 2 ranks",
    ),
    "an action without time": (
        lambda: show.board(costs=Costs(forward=0)),
        "forward is 0: .* every action takes time",
    ),
    "no microbatches": (lambda: show.board(n_microbatches=0), "n_microbatches is 0"),
    "too few ranks for a slider": (lambda: show.explore(n_ranks=0), "n_ranks is 0"),
    "True for a number": (lambda: show.explore(n_chunks=True), "n_chunks is True"),
    "a schedule no menu has": (lambda: show.explore(schedule="1f2b"), "schedule is '1f2b'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_picture_is_refused(what: str) -> None:
    call, words = REFUSED[what]
    with pytest.raises(ValueError, match=words):
        call()
