"""The page that compares the schedules. `make images` simulates every number and writes it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from course_pp.schedule import Costs, Schedule, Timeline, build, find, names, simulate

PAGE = Path(__file__).parent / "which_schedule.md"
RANKS = 4
MICROBATCHES = 16
LATENCY = Fraction(1, 2)
REMARKS = {
    "naive": "one microbatch at a time: only to see why not",
    "gpipe": "two loops; waits for no answer, so latency costs it least",
    "1f1b": "the usual first choice",
    "1f1b_eager": "1F1B with more room: for slow links",
    "interleaved_1f1b": "smaller bubble, more messages; microbatches a multiple of the ranks",
    "looped_bfs": "interleaved without a limit on what is held: latency costs little, memory much",
    "hanayo": "1F1B in waves, for about as many microbatches as ranks",
    "zb_h1": "1F1B with its weight gradients moved into the bubble",
    "zb_h2": "no bubble between steps, for twice the memory",
    "zb_v": "no bubble between steps, at 1F1B's memory; first and last stage on one rank",
    "v_half": "less memory than 1F1B, down to half of it with many ranks",
    "v_min": "the least memory, down to a third of 1F1B's with many ranks",
    "chimera": "two pipelines in opposite directions: weights twice",
    "dualpipe": "both directions, made to overlap messages: weights twice",
    "dualpipe_v": "DualPipe folded: weights once",
    "pipedream": "no flush, so late gradients: another algorithm",
}


@dataclass(frozen=True)
class Row:
    """One schedule on equal terms: the same model, the same ranks, the same batch.

    Attributes:
        name: name of the schedule.
        step: makespan; one unit is the forward of a rank's share of the model for one microbatch.
        step_late: makespan if each message takes half a unit.
        bubble: waiting time as a share of ranks times makespan.
        held: the most activations on a rank; one unit is the activations of a rank's share of the
            model for one microbatch.
        weights: copies of its share of the model that a rank holds.
        messages: messages from rank to rank in a step.
    """

    name: str
    step: Fraction
    step_late: Fraction
    bubble: Fraction
    held: Fraction
    weights: Fraction
    messages: int


def row(name: str) -> Row:
    """Simulate one schedule on 4 ranks with 16 microbatches; a backward takes two forwards."""
    schedule = build(name, RANKS, MICROBATCHES)
    share = Fraction(RANKS, schedule.n_stages)

    def at(latency: Fraction) -> Timeline:
        return simulate(
            schedule, Costs(forward=share, input_grad=share, weight_grad=share, latency=latency)
        )

    now = at(Fraction(0))
    late = at(LATENCY)
    held = max(map(Fraction, now.peak_activations))
    stages_of = Counter(rank for ranks in schedule.placement for rank in ranks)
    return Row(
        name,
        step=Fraction(now.makespan),
        step_late=Fraction(late.makespan),
        bubble=Fraction(now.bubble_fraction).limit_denominator(10_000),
        held=held * share,
        weights=max(stages_of.values()) * share,
        messages=crossings(schedule),
    )


def crossings(schedule: Schedule) -> int:
    """Return the messages of a step: a microbatch crosses each boundary of ranks down, and up."""
    n_messages = 0
    for here, there in pairwise(schedule.placement):
        for i in range(schedule.n_microbatches):
            # Where a stage has two copies, microbatches take them in turn.
            if here[i % len(here)] != there[i % len(there)]:
                n_messages += 2
    return n_messages


def remark(name: str) -> str:
    """Return the reason to take a schedule; without a remark above, its function's summary."""
    if name in REMARKS:
        return REMARKS[name]
    said = (find(name).order.__doc__ or "").partition("\n")[0].rstrip(".")
    if said[1:2].islower():  # not an abbreviation
        said = said[0].lower() + said[1:]
    return said


def rows() -> list[Row]:
    """Return all schedules in the catalogue's order."""
    return [row(name) for name in names()]


def page() -> str:
    """Return the page in Markdown."""
    table = rows()
    flushed = [each for each in table if each.name != "pipedream"]
    once = [each for each in flushed if each.weights == 1]
    serious = [each for each in once if each.name != "naive"]
    usual = next(each for each in table if each.name == "1f1b")
    lean = [each for each in once if each.held <= usual.held]

    def least_held(each: Row) -> Any:
        return each.held, each.step

    def shortest(each: Row) -> Any:
        return each.step, each.held

    def shortest_late(each: Row) -> Any:
        return each.step_late, each.held

    slow = f"links are slow (a message takes {number(LATENCY)}) and memory is what 1F1B takes"
    by = {
        "you want the simplest that works": "`1f1b`: " + told(usual),
        "memory for activations is short": best(serious, least_held),
        "the bubble is too large, and memory is what 1F1B takes": best(lean, shortest),
        "the bubble is too large, and memory is left": best(once, shortest),
        slow: best(lean, shortest_late, late=True),
        "links are slow, and memory is left": best(once, shortest_late, late=True),
    }
    lines = [
        "# Which schedule?",
        "",
        (
            f"The same model on {RANKS} ranks with {MICROBATCHES} microbatches. One unit of time is"
            " the forward of a rank's share of the model for one microbatch; input and weight"
            " gradient take as long each. One unit of memory is what that forward keeps."
        ),
        "",
        "| if | then |",
        "|---|---|",
        *(f"| {question} | {answer} |" for question, answer in by.items()),
        "",
        (
            "Your stages and links are not equal. Simulate them: `simulate(build(name, p, m),"
            " Costs(…))` takes a number a stage, and `search(p, m, costs, memory_limit)` looks for"
            " an order made for them."
        ),
        "",
        "## All of them",
        "",
        (
            f"| schedule | step | step, messages take {number(LATENCY)} | bubble | activations held"
            " | weights | messages | |"
        ),
        "|---|---|---|---|---|---|---|---|",
        *map(line, table),
        "",
        (
            "*Activations held* are those of the rank that holds most. *Weights* counts copies of a"
            " rank's share. What each schedule asks of ranks and microbatches is in [the table of"
            " schedules](schedules.md). Written by `make images` from `docs/comparison.py`."
        ),
        "",
    ]
    return "\n".join(lines)


def line(each: Row) -> str:
    return (
        f"| `{each.name}` | {number(each.step)} | {number(each.step_late)} |"
        f" {float(each.bubble):.1%} | {number(each.held)} | {number(each.weights)} × |"
        f" {each.messages} | {remark(each.name)} |"
    )


def best(table: list[Row], key: Callable[[Row], Any], late: bool = False) -> str:
    """Return the schedules whose ``key`` is the least, with the numbers of the first one."""
    least = min(map(key, table))
    found = [each for each in table if key(each) == least]
    names = " or ".join(f"`{each.name}`" for each in found)
    return f"{names}: {told(found[0], late)}"


def told(each: Row, late: bool = False) -> str:
    """Return a schedule's numbers in half a sentence."""
    step = each.step_late if late else each.step
    return f"step {number(step)}, holds {number(each.held)}, {each.messages} messages"


def number(value: Fraction) -> str:
    """Return the value with at most two digits after the point."""
    return f"{float(value):.2f}".rstrip("0").rstrip(".")
