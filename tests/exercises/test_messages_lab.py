"""What notebook 00 shows of its rings, and that three ranks get through where each has a neighbour like itself."""

from course_pp.exercises.messages_lab import added_up, contributions, even_ranks_send_first
from course_pp.exercises.ranks_and_messages import all_gather, exchange
from course_pp.launch import on_ranks

N_BYTES = 240


def reduce_scatter(chunks, rank, p):
    sent = 0
    for step in range(p - 1):
        received = chunks[rank - step - 1].clone()
        sent += exchange(chunks[rank - step], (rank + 1) % p, received, (rank - 1) % p)
        chunks[rank - step - 1].add_(received)
    return sent


def adds_nothing(chunks, rank, p):
    return 0


def looked_at(rank):
    return (
        even_ranks_send_first(rank),
        contributions(rank, reduce_scatter),
        contributions(rank, reduce_scatter, all_gather),
        added_up(rank, N_BYTES, reduce_scatter),
        added_up(rank, N_BYTES, adds_nothing),
    )


def test_three_ranks_get_through_and_their_contributions_can_be_told_apart() -> None:
    received, halves, wholes, right, wrong = zip(*on_ranks(3, looked_at), strict=True)
    assert received == (2, 0, 1)
    assert halves == ([1, 111, 101], [11, 10, 111], [111, 110, 100])
    assert wholes == ([111, 111, 111],) * 3
    assert right == ((True, 2 * 2 * N_BYTES // 3),) * 3
    assert wrong == ((False, 2 * N_BYTES // 3),) * 3
