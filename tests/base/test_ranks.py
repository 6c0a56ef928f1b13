"""Ranks go on together or refuse together, and none waits for a rank that will not come."""

import pickle
from typing import Any

import pytest

from course_pp.base.ranks import RankMissing, Ranks
from course_pp.launch import on_ranks
from course_pp.launch.errors import is_echo


def what_ranks_say(rank: int) -> dict[str, Any]:
    """Return the result of each method if one rank alone finds a fault."""
    ranks = Ranks(limit_s=20.0)

    def work(failing_rank: int, error: Exception) -> object:
        if rank == failing_rank:
            raise error
        return lambda: rank  # what cannot be pickled stays on its rank

    def refusal_of(call: Any) -> str:
        with pytest.raises(ValueError, match=r"\w") as refused:
            call()
        return str(refused.value)

    def block(failing_rank: int, error: Exception) -> Any:
        with ranks.refusing_together():
            done = work(failing_rank, error)
        return done

    with pytest.raises(TypeError, match="integer"):  # a ValueError, too, as the next one is
        block(0, TypeError("no integer"))
    said = {
        "gather": ranks.gather("x" * rank),
        "largest": ranks.largest(-rank),
        "a problem of rank 1": refusal_of(lambda: ranks.refuse("no room" if rank == 1 else None)),
        "problems of two": refusal_of(
            lambda: ranks.refuse(f"rank {rank} is ill" if rank else None)
        ),
        "different facts": refusal_of(
            lambda: ranks.require_equal({"m": 8, "seq_len": 4 + (rank == 2)})
        ),
        "failed work": refusal_of(
            lambda: ranks.collectively(lambda: work(2, OSError("disk full")))
        ),
        "a failed block": refusal_of(lambda: block(1, TypeError("no integer"))),
        "a bug": refusal_of(
            lambda: ranks.collectively(lambda: work(1, RuntimeError("empty shard")))
        ),
    }
    ranks.refuse(None)
    ranks.require_equal({"m": 8})
    said["done work"] = ranks.collectively(lambda: work(-1, OSError()))() == rank
    said["done block"] = block(-1, OSError())() == rank
    if rank:  # rank 0 does not come, and the others wait no longer than the limit
        with pytest.raises(RankMissing) as error:
            Ranks(limit_s=0.5).collectively(lambda: ranks)
        said["no rank 0"] = pickle.loads(pickle.dumps(error.value))
    return said


def test_all_ranks_go_on_or_all_refuse_with_one_sentence() -> None:
    for rank, said in enumerate(on_ranks(3, what_ranks_say, timeout_s=60.0)):
        if rank:
            error = said.pop("no rank 0")
            assert (error.rank, error.n_ranks, error.missing) == (rank, 3, (0,))
            assert "for rank 0, ended or did not come" in str(error)
        assert said == {
            "gather": ["", "x", "xx"],
            "largest": 0,
            "a problem of rank 1": "no room",
            "problems of two": "rank 1 is ill",
            "different facts": "rank 2 was given seq_len=5, rank 0 4: give every rank the same",
            "failed work": "disk full",
            "a failed block": "no integer",
            "a bug": "RuntimeError: empty shard",
            "done work": True,
            "done block": True,
        }


def test_a_process_without_a_group_is_alone() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.gather("x"), ranks.largest(3)) == (0, 1, ["x"], 3)
    ranks.refuse(None)
    ranks.require_equal({"m": 8})
    assert ranks.collectively(lambda: 3) == 3
    with pytest.raises(ValueError, match="no room"):
        ranks.refuse("no room")


def test_a_rank_that_misses_another_is_not_named_as_the_first_to_fail() -> None:
    missed = pickle.loads(pickle.dumps(RankMissing(0, 2, 0.0)))
    assert is_echo(f"RankMissing: {missed}", missed.began_elsewhere)
