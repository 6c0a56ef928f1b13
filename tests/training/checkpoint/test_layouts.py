"""A checkpoint of any layout resumes at any other, with the losses of a run that was never
interrupted; at its own layout bit for bit.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from course_pp.launch import on_ranks
from course_pp.model import ModelConfig
from tests.training.checkpoint.resuming import Case, config_of, data_of, train, train_jobs

LOSS_TOLERANCE = 1e-11


class Span(NamedTuple):
    """Steps of the whole run, and after how many of them it is saved."""

    saved_at: int
    steps: int


LONG_RUN = Span(3, 13)
# the loss after the save depends on the weights, the next on what the optimizer had
SHORT_RUN = Span(1, 3)

LAYOUTS = [
    Case(),
    Case(tp=2),
    Case(dp_shard=2, reshard=True),
    Case(dp_shard=3, reshard=True),  # shards of unequal size
    Case(dp_replicate=2, dp_shard=2, reshard=True),
    Case(dp_shard=2, tp=2, reshard=True),
    Case(pp=2, schedule="1f1b"),
    Case(pp=4, schedule="gpipe"),
    Case(pp=2, schedule="interleaved_1f1b", dp_shard=2, reshard=False),
    Case(pp=2, schedule="zb_v", tp=2),
    Case(pp=2, schedule="zb_v", dp_shard=2, tp=2, reshard=False),
    Case(pp=8, schedule="1f1b"),
]

# By the layout to resume at, those to resume from; none has more than two pipeline ranks.
SAMPLE = {
    (LAYOUTS[3], True): [LAYOUTS[6]],
    (LAYOUTS[9], True): [LAYOUTS[0], LAYOUTS[8]],
    (LAYOUTS[2], False): [LAYOUTS[1]],
}
LONG = (LAYOUTS[9], True)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def uninterrupted(config: ModelConfig, n_steps: int) -> list[float]:
    """Losses of the whole run in one process."""
    return on_ranks(1, train, Case(), config, data_of(config, n_steps), timeout_s=100)[0].losses


def saved_by(layout: Case, config: ModelConfig, roots: Path, saved_at: int) -> Path:
    """Checkpoints of a run at ``layout`` that stopped after ``saved_at`` steps."""
    root = roots / f"{layout}-{config.tie_embeddings}-{config.n_layers}-{config.n_experts}"
    if not root.exists():
        on_ranks(
            layout.n_ranks,
            _stop_early,
            layout,
            config,
            data_of(config, saved_at),
            root,
            timeout_s=100,
        )
    return root / "sync"


def _stop_early(rank, layout, config, data, root):
    train(rank, layout, config, data, root, save_at=len(data))


def differences(
    layout: Case, config: ModelConfig, sources: list[Case], roots: Path, span: Span
) -> list[float]:
    """Largest difference of any rank's loss after the save, for each layout that resumes."""
    saved_at, n_steps = span
    data, expected = data_of(config, n_steps), uninterrupted(config, n_steps)[saved_at:]
    saved = [saved_by(source, config, roots, saved_at) for source in sources]
    jobs = [((layout, config, data, root), {"resume": True}) for root in saved]
    ranks = on_ranks(layout.n_ranks, train_jobs, jobs, timeout_s=500)
    found = []
    for parts in zip(*ranks, strict=True):
        assert all(len(part.losses) == n_steps - saved_at for part in parts)
        found.append(
            max(abs(a - b) for part in parts for a, b in zip(part.losses, expected, strict=True))
        )
    return found


@pytest.mark.parametrize(
    ("layout", "tied"),
    [pytest.param(*each, marks=pytest.mark.long if each == LONG else ()) for each in SAMPLE],
    ids=str,
)
def test_a_run_resumes_at_another_layout(layout: Case, tied: bool, roots: Path) -> None:
    config = config_of(tied, n_layers=4)
    assert (
        max(differences(layout, config, SAMPLE[layout, tied], roots, SHORT_RUN)) <= LOSS_TOLERANCE
    )


WITH_EXPERTS = [
    Case(),
    Case(dp_shard=2, ep=2, reshard=True),
    Case(dp_shard=4, ep=4, reshard=False),
    Case(pp=2, schedule="1f1b", dp_shard=2, ep=2),
    Case(pp=2, schedule="zb_v", tp=2),
]
HARDER = [
    Case(dp_shard=6, ep=2),  # shards of unequal size
    Case(dp_replicate=2, dp_shard=2, ep=2),
    Case(pp=2, schedule="interleaved_1f1b", dp_shard=2, tp=2, ep=2),
]


@pytest.mark.parametrize(
    ("layout", "sources"),
    [
        (WITH_EXPERTS[3], [WITH_EXPERTS[0], WITH_EXPERTS[2]]),
        *(
            pytest.param(
                layout, [each for each in WITH_EXPERTS if each != layout], marks=pytest.mark.long
            )
            for layout in WITH_EXPERTS
        ),
        pytest.param(Case(dp_shard=4, ep=2), HARDER, marks=pytest.mark.long),
    ],
    ids=lambda value: str(value) or "one" if isinstance(value, Case) else f"from {len(value)}",
)
def test_experts_resume_at_another_layout(layout: Case, sources: list[Case], roots: Path) -> None:
    sizes = {"n_experts": 8, "expert_dim": 24, "moe_every": 2, "n_shared_experts": 1}
    config = config_of(False, n_layers=4, **sizes, balance="bias", balance_coef=0.1)
    assert max(differences(layout, config, sources, roots, SHORT_RUN)) <= LOSS_TOLERANCE


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout) or "one")
def test_a_run_resumes_from_every_layout(layout: Case, tied: bool, roots: Path) -> None:
    assert max(differences(layout, config_of(tied), LAYOUTS, roots, LONG_RUN)) <= LOSS_TOLERANCE


SAME = [
    Case(),
    Case(pp=2, schedule="interleaved_1f1b", dp_shard=2),
    pytest.param(Case(pp=2, schedule="zb_v", tp=2), marks=pytest.mark.long),
    pytest.param(Case(dp_replicate=2, dp_shard=2), marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout", SAME, ids=lambda layout: str(layout) or "one process")
def test_at_the_same_layout_a_resumed_run_is_bit_identical(layout: Case, tmp_path: Path) -> None:
    config = config_of(tied=layout.pp > 1, n_layers=4)
    data = data_of(config, 2)
    jobs: list[Any] = [((layout, config, data, tmp_path), {"save_at": 1, "dropout": 0.1})]
    again = {"resume": True, "seed": 1, "dropout": 0.1}
    jobs += [((layout, config, data, tmp_path / how), again) for how in ("sync", "async")]
    for one, *others in on_ranks(layout.n_ranks, train_jobs, jobs, timeout_s=100):
        for other in others:
            assert other.losses == one.losses[1:]
            assert other.rng == one.rng[1:]
            assert other.local.keys() == one.local.keys()
            assert not [
                name
                for name, tensor in one.local.items()
                if not torch.equal(tensor, other.local[name])
            ]
