"""The time that an action costs, and the memory that it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

from course_pp.schedule.action import Time
from course_pp.schedule.edges import Edge, lanes_of

PerStage = Time | Sequence[Time]
"""One value for every stage, or a sequence with one for each."""

# A sequence has one value a stage, except for these.
_PER = {
    "latency": "boundaries",
    "message_bytes": "boundaries",
    "edge_latency": "readers of edges",
    "edge_bytes": "readers of edges",
    "edge_activation": "readers of edges",
}


@dataclass(frozen=True)
class Costs:
    """Times of actions and messages, and memory. Any unit; integers and fractions stay exact.

    Each is one number for all stages, or a sequence with one number a stage. ``latency`` and
    ``message_bytes`` have one number a boundary instead; boundary s lies between stages s and
    s + 1.

    Attributes:
        forward: time of ``F``.
        input_grad: time of ``I``; with ``weight_grad`` the time of ``B``.
        weight_grad: time of ``W``.
        recompute: time to run the forward again at the start of ``I`` or ``B`` (activation
            checkpointing).
        overlapped: time of an overlapped pair whose forward is in this stage; by default the time
            of its two actions.
        update: time of ``U``, the stage's optimizer step.
        latency: time of a message on its way between two ranks, whatever its size. It occupies
            neither rank.
        message_bytes: size of an activation, and of its gradient.
        edge_latency: latency of the messages of edges (skip connections): one number, or one for
            each reader of each edge in order; by default the longest latency of the boundaries that
            the edge passes over.
        edge_bytes: size of an edge's value, and of its gradient; one number or one for each reader.
        bandwidth: bytes per unit of time; a message takes ``latency + message_bytes / bandwidth``.
            No link is shared.
        activation: memory that ``F`` of one microbatch keeps.
        released_by_input_grad: the part of ``activation`` that ``I`` releases; ``W`` releases the
            rest.
        weights: memory of the stage's parameters, once for each version that microbatches in flight
            still need.
        token_latency: time of a token on its way back to the first stage, in generation, whatever
            ``bandwidth``; by default the longest latency of all boundaries.
        edge_activation: memory of an edge's value on a rank that reads it (``peak_values``), on top
            of ``activation``; one number or one for each reader. A rank that reads it several times
            holds it once.

    Raises:
        ValueError: for a value that is negative, infinite, NaN or not a number, a bandwidth of 0,
            more memory released than kept.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    latency: PerStage = 0
    recompute: PerStage = 0
    overlapped: PerStage | None = None
    update: PerStage = 0
    message_bytes: PerStage = 0
    edge_latency: PerStage | None = None
    edge_bytes: PerStage = 0
    bandwidth: Time | None = None
    activation: PerStage = 1
    released_by_input_grad: PerStage = 0
    weights: PerStage = 0
    token_latency: Time | None = None
    edge_activation: PerStage = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            for each in value if isinstance(value, tuple) else (value,):
                refuse_impossible_number(field.name, each, "or one for each stage")
        if isinstance(self.bandwidth, tuple) or self.bandwidth == 0:
            raise ValueError(
                f"bandwidth is {self.bandwidth}: give one number above 0, or leave it out if"
                " unlimited"
            )
        if isinstance(self.token_latency, tuple):
            raise ValueError(
                f"token_latency is {self.token_latency}: give one number, or leave it out"
            )
        n = max(_length(self.activation), _length(self.released_by_input_grad))
        kept_by_stage = self.each("activation", n)
        released_by_stage = self.each("released_by_input_grad", n)
        for kept, released in zip(kept_by_stage, released_by_stage, strict=True):
            if released > kept:
                raise ValueError(
                    f"released_by_input_grad is {released} but the forward keeps {kept}"
                    " (activation): give at most what is kept"
                )

    def each(self, name: str, n: int) -> tuple[Time, ...]:
        """Return the values of the attribute ``name`` for ``n`` stages, boundaries or readers."""
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * n
        if len(value) != n:
            raise ValueError(
                f"{name} has {len(value)} values for {n} {_PER.get(name, 'stages')}: give one"
                " number, or one for each"
            )
        return value

    def durations(self, n_stages: int) -> dict[str, tuple[Time, ...]]:
        """Return for each kind of action its time in each stage."""
        recompute = self.each("recompute", n_stages)
        input_grad = self.each("input_grad", n_stages)
        weight_grad = self.each("weight_grad", n_stages)
        recomputed = tuple(map(sum, zip(recompute, input_grad, strict=True)))
        return {
            "F": self.each("forward", n_stages),
            "I": recomputed,
            "W": weight_grad,
            "B": tuple(map(sum, zip(recomputed, weight_grad, strict=True))),
            "U": self.each("update", n_stages),
        }

    def transfers(self, n_stages: int) -> tuple[Time, ...]:
        """Return for each boundary the time of a message between two ranks."""
        n_boundaries = n_stages - 1
        sizes = self.each("message_bytes", n_boundaries)
        return self._with_bytes(self.each("latency", n_boundaries), sizes)

    def edge_transfers(self, edges: Sequence[Edge], n_stages: int) -> tuple[Time, ...]:
        """Return for each reader of each edge the time of a message between two ranks."""
        lanes = lanes_of(edges)
        if self.edge_latency is None:
            latency = self.each("latency", n_stages - 1)
            waits = tuple(max(latency[lane.writer : lane.reader], default=0) for lane in lanes)
        else:
            waits = self.each("edge_latency", len(lanes))
        return self._with_bytes(waits, self.each("edge_bytes", len(lanes)))

    def _with_bytes(self, waits: tuple[Time, ...], sizes: tuple[Time, ...]) -> tuple[Time, ...]:
        if self.bandwidth is None:
            return waits
        bandwidth = self.bandwidth
        return tuple(
            wait + divide(size, bandwidth) for wait, size in zip(waits, sizes, strict=True)
        )

    def token_transfer(self, n_stages: int) -> Time:
        """Return the time of a token on its way from the last stage to the first."""
        if self.token_latency is not None:
            return self.token_latency
        return max(self.each("latency", n_stages - 1), default=0)


def _length(value: PerStage) -> int:
    return len(value) if isinstance(value, tuple) else 1


def divide(part: Time, whole: Time) -> Time:
    """Return ``part / whole``, exact unless one is a float: dividing two integers would round."""
    if isinstance(part, float) or isinstance(whole, float):
        return part / whole
    return Fraction(part, whole)


def refuse_impossible_number(name: str, value: object, otherwise: str) -> None:
    """Raise ValueError unless ``value`` is a finite number of at least 0.

    ``otherwise`` says what else the caller could give.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | Fraction):
        raise ValueError(
            f"{name} is {value!r}: give a number (int, float or Fraction), {otherwise}"
        )
    # Of NaN and of infinity, the difference to itself is NaN, and NaN is not 0.
    if value - value != 0 or value < 0:
        raise ValueError(f"{name} is {value}: give a finite number of at least 0, {otherwise}")
