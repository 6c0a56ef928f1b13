"""The orders of torch's own schedules.

torch has no public way to ask for them. This file alone uses its private names.
"""

from types import SimpleNamespace

from torch.distributed.pipelining import schedules as torch_schedules


def torch_rows(name: str, p: int, m: int, v: int) -> list[list[str]]:
    """Return each rank's row of torch's schedule of that name, idle slots as empty strings."""
    cls = torch_schedules.get_schedule_class(name)
    rounds = max(1, m // p)
    # To build a schedule takes a process group on every rank. Its orders need only these numbers.
    itself = SimpleNamespace(
        pp_group_size=p,
        n_local_stages=v,
        num_stages=p * v,
        _num_stages=p * v,
        _stages=range(v),
        _n_microbatches=m,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    if hasattr(cls, "_calculate_single_rank_operations"):
        rows = [cls._calculate_single_rank_operations(itself, rank) for rank in range(p)]
    else:
        rows = list(cls._get_pipeline_order(itself).values())
    # Reducing gradients among data-parallel ranks is no part of the order.
    return [
        ["" if a is None else str(a) for a in row if "REDUCE_GRAD" not in str(a)] for row in rows
    ]


def torch_accepts(rows: list[list[str]], n_stages: int, n_microbatches: int) -> dict[int, int]:
    """Return the rank that torch gives each stage, read from the cells of a CSV.

    Raises an AssertionError if torch refuses the cells.
    """
    actions = {
        rank: [torch_schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(rows)
    }
    return torch_schedules._validate_schedule(actions, len(rows), n_stages, n_microbatches)
