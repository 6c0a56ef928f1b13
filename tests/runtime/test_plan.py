"""The messages between actions: both ends know the order, which blocks no legal schedule."""

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from course_pp.runtime.mailbox import Mailbox
from course_pp.runtime.messages import Content, Message, RankPlan, plan_messages
from course_pp.schedule import Product, Schedule, build, names
from tests.grids import examples
from tests.runtime.random_schedules import random_schedule
from tests.runtime.small import parse

Operation = tuple[Literal["take", "arrived", "send"], Message]


def known_schedules() -> Iterator[Schedule]:
    for name, p, m in product(names(), range(1, 5), range(1, 10)):
        try:
            schedule = build(name, p, m)
        except ValueError:
            continue
        yield schedule
        yield schedule.forward_only()


legal = st.integers(0, 10**6).map(random_schedule) | st.sampled_from(list(known_schedules()))
# Ranks that exchange the gradients of shared weights. Pairs come in both orders, and of a rank with
# itself.
shares = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4)
any_order = st.randoms(use_true_random=False)


def plans_for(schedule: Schedule, pairs: Sequence[tuple[int, int]] = ()) -> tuple[RankPlan, ...]:
    return plan_messages(schedule, [pair for pair in pairs if max(pair) < schedule.n_ranks])


def operations(of: RankPlan) -> Iterator[Operation]:
    """Return a rank's sends and receives in a step, in order."""
    for step in of.steps:
        yield from (("take", message) for message in step.receives)
        yield from (("arrived", message) for message in step.arrived)
        yield from (("send", message) for message in step.sends)
    yield from (("send", message) for message in named("shared gradients", of.outgoing))
    yield from (("take", message) for message in named("shared gradients", of.incoming))
    yield from (("take", message) for message in named("report", of.incoming))
    yield from (("send", message) for message in named("report", of.outgoing))
    yield from (("send", message) for message in named("answer", of.outgoing))
    yield from (("take", message) for message in named("answer", of.incoming))


def named(content: str, channels: Any) -> list[Message]:
    return [message for row in channels.values() for message in row if message.content == content]


@given(legal, shares)
def test_both_ends_of_a_channel_have_the_same_messages_numbered_in_order(
    schedule: Schedule, pairs: list[tuple[int, int]]
) -> None:
    plans = plans_for(schedule, pairs)
    outgoing = {(p.rank, target): row for p in plans for target, row in p.outgoing.items()}
    incoming = {(source, p.rank): row for p in plans for source, row in p.incoming.items()}
    assert outgoing == incoming
    for (source, target), row in outgoing.items():
        assert source != target
        assert [(m.source, m.target, m.number) for m in row] == [
            (source, target, i) for i in range(len(row))
        ]


@given(legal)
def test_each_product_of_another_rank_is_sent_once_and_received_by_the_action_that_needs_it(
    schedule: Schedule,
) -> None:
    plans = plans_for(schedule)
    made_by: dict[Content, int] = {
        p: rank
        for rank, row in enumerate(schedule.actions)
        for a in row
        for part in a.parts
        for p in part.provides
    }
    for this in plans:
        for step in this.steps:
            needs = [p for part in step.action.parts for p in part.needs(schedule.n_stages)]
            received = [message.content for message in step.receives]
            assert Counter(received) == Counter(p for p in needs if made_by[p] != this.rank)
            assert {message.content for message in step.sends} <= {
                p for x in step.action.parts for p in x.provides
            }
            assert all(message.source == made_by[message.content] for message in step.receives)
    sent = [message for this in plans for step in this.steps for message in step.sends]
    received_anywhere = [
        message for this in plans for step in this.steps for message in step.receives
    ]
    assert len(set(sent)) == len(sent)
    assert set(sent) == set(received_anywhere)


@given(legal, shares, any_order)
@examples(300)
def test_by_order_alone_every_run_ends_and_what_counts_as_arrived_has_been_taken(
    schedule: Schedule, pairs: list[tuple[int, int]], rng: random.Random
) -> None:
    play(plans_for(schedule, pairs), rng)


def play(plans: Sequence[RankPlan], rng: random.Random) -> None:
    """Go through a step, one operation of some rank at a time, and fail where none is possible.

    A message leaves only when those before it in its channel have left, and is there only for a
    receiver that has taken all before it; a sender never waits.
    """
    rest = [list(operations(p))[::-1] for p in plans]
    ready: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    gone: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()
    while any(rest):
        able = [
            rank
            for rank, left in enumerate(rest)
            if left
            and (left[-1][0] != "take" or gone[channel_of(left[-1][1])] > left[-1][1].number)
        ]
        assert able, f"all wait: {[left[-1] for left in rest if left]}"
        what, message = rest[rng.choice(able)].pop()
        channel = channel_of(message)
        if what == "send":
            ready[channel].add(message.number)
            while gone[channel] in ready[channel]:
                gone[channel] += 1
        elif what == "take":
            assert message.number == taken[channel], f"{message} is taken out of turn"
            taken[channel] += 1
        else:
            assert taken[channel] > message.number, (
                f"{message} is said to have arrived, and has not been taken"
            )
    assert taken == gone


def channel_of(message: Message) -> tuple[int, int]:
    return message.source, message.target


def most_open(schedule: Schedule) -> list[int]:
    """Return the most messages that each rank has sent and does not know to be taken."""
    most = []
    for this in plan_messages(schedule):
        sizes = [0]
        size = 0
        for step in this.steps:
            size += len(step.sends) - len(step.arrived)
            sizes.append(size)
        most.append(max(sizes))
    return most


@pytest.mark.parametrize("m", [8, 32])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # One a microbatch in flight, and the gradient that was sent last.
        ("1f1b", [4, 4, 3, 2]),
        ("zb_h1", [4, 4, 3, 2]),
        ("zb_h2", [7, 7, 5, 3]),
        ("interleaved_1f1b", [7, 7, 5, 5]),
        ("zb_v", [7, 6, 6, 4]),
        ("dualpipe_v", [7, 6, 6, 4]),
        ("naive", [1, 1, 1, 1]),
    ],
)
def test_the_messages_a_rank_holds_open_do_not_grow_with_the_microbatches(
    name: str, m: int, expected: list[int]
) -> None:
    assert most_open(build(name, 4, m)) == expected


@pytest.mark.parametrize("m", [8, 32])
def test_with_all_forwards_first_nothing_comes_back_that_could_tell_what_has_arrived(
    m: int,
) -> None:
    assert most_open(build("gpipe", 4, m)) == [m] * 4


def test_a_message_that_is_ready_early_is_held_back_for_one_that_is_needed_first() -> None:
    # Rank 0 makes microbatch 0 first; rank 1 needs 1 first, and can only say so in its place in the
    # channel.
    crossed = parse("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    sender, receiver = plans_for(crossed)
    order = [message.content for message in sender.outgoing[1]]
    assert order == [Product("activation", 0, 1), Product("activation", 0, 0), "answer"]
    assert [message.number for step in sender.steps for message in step.sends] == [1, 0]
    assert [message.number for step in receiver.steps for message in step.receives] == [0, 1]


class StrictWire:
    """Threads as ranks. Nothing is stored on the way: a send ends when it is received.

    Without tags messages are told apart by their order alone, and one receive a channel may be
    posted at a time.
    """

    device = torch.device("cpu")

    def __init__(self, exchange: "Exchange", rank: int, has_tags: bool) -> None:
        self._exchange = exchange
        self._rank = rank
        self._has_tags = has_tags
        self.window = 32 if has_tags else 1

    def isend(self, buffer: Tensor, target: int, number: int) -> Any:
        return self._exchange.begin(
            "send", (self._rank, target), number if self._has_tags else None, buffer
        )

    def irecv(self, buffer: Tensor, source: int, number: int) -> Any:
        return self._exchange.begin(
            "receive", (source, self._rank), number if self._has_tags else None, buffer
        )


class Transfer:
    """One end of a message; what a backend calls work."""

    def __init__(self, buffer: Tensor, changed: threading.Condition) -> None:
        self.buffer = buffer
        self.done = False
        self._changed = changed

    def wait(self, timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.done, timeout.total_seconds()):
                raise RuntimeError("nobody at the other end")


class Exchange:
    """All channels. Of the sends and receives with the same tag, the oldest meet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: defaultdict[Any, list[Transfer]] = defaultdict(list)

    def begin(
        self, end: str, channel: tuple[int, int], tag: int | None, buffer: Tensor
    ) -> Transfer:
        transfer = Transfer(buffer, self._changed)
        with self._changed:
            sends = self._open["send", channel, tag]
            receives = self._open["receive", channel, tag]
            (sends if end == "send" else receives).append(transfer)
            assert tag is not None or len(receives) <= 1, (
                "which of the receives is for the next message?"
            )
            while sends and receives:
                sent = sends.pop(0)
                received = receives.pop(0)
                assert len(sent.buffer) == len(received.buffer), "gloo would end the process here"
                received.buffer.copy_(sent.buffer)
                sent.done = received.done = True
            self._changed.notify_all()
        return transfer

    def is_empty(self) -> bool:
        return not any(self._open.values())


def value_of(message: Message, step: int) -> Tensor:
    """Return a value that only this message has; its shape differs in the last of three steps."""
    values = [message.source, message.target, message.number, step]
    return torch.tensor(values * (1 + message.number % 3 + (step == 2)))


def follow(this: RankPlan, wire: StrictWire, rng: random.Random) -> None:
    """Three steps of one rank, which computes for a random while between its messages."""
    mailbox = Mailbox(this, wire, torch.device("cpu"), timedelta(seconds=10), None)
    for step in range(3):
        mailbox.begin()
        for what, message in operations(this):
            time.sleep(rng.choice((0, 0, 0, 2e-4)))
            if what == "send":
                mailbox.send(message, value_of(message, step))
            elif what == "arrived":
                mailbox.arrived([message])
            else:
                assert torch.equal(mailbox.take(message), value_of(message, step)), message
        mailbox.end()


@pytest.mark.sample(4)
@pytest.mark.parametrize("has_tags", [True, False], ids=["tags", "order alone"])
@pytest.mark.parametrize("seed", range(30))
def test_the_mailbox_needs_nothing_that_stores_messages_on_the_way(
    seed: int, has_tags: bool
) -> None:
    schedule = random_schedule(seed)
    plans = plans_for(schedule, [(0, schedule.n_ranks - 1)])
    exchange = Exchange()
    with ThreadPoolExecutor(schedule.n_ranks) as threads:
        ranks = [
            threads.submit(
                follow,
                this,
                StrictWire(exchange, this.rank, has_tags),
                random.Random(f"{seed} {this.rank}"),
            )
            for this in plans
        ]
        for rank in ranks:
            rank.result()
    assert exchange.is_empty()
