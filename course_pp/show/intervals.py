"""What a timeline implies between its spans: messages on their way, and activations held."""

from collections.abc import Iterator
from dataclasses import dataclass

from course_pp.schedule import Product, Span, Time, Timeline


@dataclass(frozen=True)
class Message:
    """What one rank sent to another.

    Attributes:
        maker: the span that made it; it is sent when that ends.
        arrival: when it is there, as far as the timeline knows how long messages take.
        taker: the span that needs it.
    """

    product: Product
    maker: Span
    arrival: Time
    taker: Span


@dataclass(frozen=True)
class Held:
    """The activations of one microbatch in one stage, from the start of its forward until the end of its backward."""

    rank: int
    stage: int
    microbatch: int
    start: Time
    end: Time


def messages(tl: Timeline) -> Iterator[Message]:
    """Yield every message between two ranks that the timeline shows made and taken, in the order of taking ends."""
    makers: dict[Product, Span] = {}
    for span in sorted(tl.spans, key=lambda each: (each.end, each.start)):
        for part in span.action.parts:
            for product in part.needs(tl.n_stages):
                maker = makers.get(product)
                if maker is None or maker.rank == span.rank or maker.end > span.start:
                    continue
                boundary = product.stage - (product.what == "gradient")
                takes = tl.transfers[boundary] if tl.transfers else 0
                yield Message(product, maker, min(maker.end + takes, span.start), span)
        for part in span.action.parts:
            makers.update(dict.fromkeys(part.provides, span))


def held_activations(tl: Timeline) -> Iterator[Held]:
    """Yield every interval in which a rank holds activations; until the makespan if their backward is not there."""
    for rank, row in enumerate(tl.by_rank):
        begun: dict[tuple[int, int], Time] = {}
        for span in row:
            for part in span.action.parts:
                place = (part.stage, part.microbatch)
                if part.kind == "F":
                    begun.setdefault(place, span.start)
                elif part.kind in "BW" and place in begun:
                    yield Held(rank, *place, begun.pop(place), span.end)
        for place, start in begun.items():
            yield Held(rank, *place, start, tl.makespan)
