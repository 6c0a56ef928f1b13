"""A hang is told in terms of what a step sends, from what each rank was doing."""

import pytest

from course_pp.exercises.mistakes import Stopped, explained
from course_pp.launch import Wait
from course_pp.launch.errors import diagnosis

WAITS_FOR_A_HANDLE = "cell line 9: send.wait()"


def receives(rank: int, source: int) -> Wait:
    return Wait(rank, "recv", (source,), "cell line 5: recv_activation(x, link)")


def sends(rank: int, to: int, line: str = "cell line 7: dist.send(x, 1)") -> Wait:
    return Wait(rank, "send", (to,), line)


def is_back(rank: int) -> Wait:
    return Wait(rank, "returned", (), "")


def computes(rank: int) -> Wait:
    return Wait(rank, "computes", (), "cell line 3: while in_flight:")


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ([receives(0, 1), receives(1, 0)], ["Everyone receives, nobody sends", "or it was lost"]),
        (
            [sends(0, 1), sends(1, 0)],
            ["A blocking `send` ends when its receiver takes the message"],
        ),
        (
            [sends(0, 1, WAITS_FOR_A_HANDLE), sends(1, 0, WAITS_FOR_A_HANDLE)],
            ["is to send it blocking", "nobody takes"],
        ),
        ([receives(0, 1), is_back(1)], ["Rank 1 has returned", "or it was lost"]),
        (
            [sends(0, 1, WAITS_FOR_A_HANDLE), is_back(1)],
            ["Rank 1 has returned", "has to be received there"],
        ),
        ([receives(0, 1), computes(1)], ["Look at rank 1 first", "does a loop of it never end?"]),
    ],
    ids=["all receive", "all send", "all wait for handles", "lost", "not taken", "a loop"],
)
def test_the_cause_of_a_hang_is_what_its_ranks_were_doing(
    waits: list[Wait], words: list[str]
) -> None:
    stopped = Stopped("endless", "It was still running.", diagnosis(waits), waits=tuple(waits))
    told = explained(stopped)
    assert told.symptom == stopped.symptom
    assert [word for word in words if word not in told.cause] == [], told.cause


def test_what_is_no_hang_is_left_as_it_is() -> None:
    for waits in [(), (computes(0),)]:
        stopped = Stopped("raised", "It raised.", "Because.", waits=waits)
        assert explained(stopped) is stopped
