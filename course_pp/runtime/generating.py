"""Text from a pipeline: prompts take turns, so that every rank has one to work on.

    new = generate({rank: stage}, prompts, n_tokens=20)          # on each rank, with its own stages

A token goes from the last stage back to the first, which meanwhile works on other prompts:
:func:`course_pp.schedule.generation` gives the order, which runs on the same engine as any other schedule, emulated
clusters included.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.arguments import WrongArgument, check_arguments, refuse_unless
from course_pp.collective import Ranks, rank_by_stage
from course_pp.runtime.cluster import EmulatedCluster
from course_pp.runtime.engine import Engine, build_engine, wire_for
from course_pp.runtime.executor import Batch, Executor, _Call
from course_pp.runtime.plan import plan
from course_pp.runtime.recorder import Recorder
from course_pp.runtime.settled import Settled, settle
from course_pp.runtime.sharded import ShardedStages
from course_pp.runtime.stage import Stage
from course_pp.runtime.stages import Stages
from course_pp.schedule import Action, Product, Schedule, generation
from course_pp.schedule.declared import declared_by
from course_pp.schedule.schedule import MOST_FORWARDS

__all__ = ["generate"]

_LIMIT_S = 300.0  # one rank may take minutes longer than another to build its stages

Choose = Callable[[Tensor], Tensor]
"""From logits (batch, vocabulary) to token ids (batch,)."""


def generate(
    stages: Stages,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    choose: Choose | None = None,
    end: int | None = None,
    group_size: int = 1,
    cache: bool = True,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    recorder: Recorder | None = None,
    cluster: EmulatedCluster | None = None,
    transport: str | None = None,
    timeout_s: float = 60.0,
) -> list[list[int]]:
    """Continue each prompt by up to ``n_tokens`` tokens. Call it on every rank at once.

        generate({rank: build_stage_module(config, rank, 4)}, [[5, 6, 7], [8, 9]], 10)

    Give at least as many prompts (or groups) as there are stages: one alone keeps one rank busy at a time.

    Args:
        stages: as for :class:`Pipeline`. The first is called with token ids (batch, seq); the last returns logits
            (batch, seq, vocabulary), alone, first in a tuple, or as ``logits`` of a dict.
        prompts: token ids, the same on every rank; their lengths may differ.
        choose: takes tokens from logits, on the last stage's rank; the most likely one unless given.
        end: after this token a prompt is done.
        group_size: how many prompts of equal length may go through the stages as one batch.
        cache: keep keys and values in each stage, so that a token costs one position. Every stage then needs a method
            ``new_cache()`` and takes its result as ``cache=``, like those of :mod:`course_pp.model`. If False, the
            whole text goes through all stages for each token, and any stages will do, such as those that
            :func:`course_pp.parallel.auto_split` makes.
        group, device, recorder, cluster, transport, timeout_s: as for :class:`Pipeline`.

    Returns:
        The new tokens of each prompt, ``end`` included, on every rank. Modules stay in the mode they are in.

    Raises:
        ValueError: on every rank, for missing prompts or prompts that differ from rank 0's, for stages that do not fit
            together, have no cache or read values beyond their neighbours', and for whatever :class:`Pipeline` refuses.
        PipelineError: on every rank, if a stage raises; says which rank, stage, group and token it was.
    """
    given = locals()
    ranks = Ranks(group, limit_s=_LIMIT_S)
    if ranks.rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the pipeline's group: call it on the group's ranks only")
    work, placement = _agree(ranks, given)
    schedule = generation(ranks.size, len(work.groups), n_tokens, placement=placement)
    settled = settle(
        schedule,
        stages,
        None,
        group=group,
        device=device,
        recompute=False,
        tied=(),
        recorder=recorder,
        cluster=cluster,
        transport=transport,
        timeout_s=timeout_s,
        optimizers=None,
        versions=None,
        generates=True,
    )
    engine = _engine(settled, work, given)

    def step() -> Tensor:
        with ShardedStages(settled.modules.values(), trains=False).reduced_once(), torch.no_grad():
            engine.executor.run(Batch([row.to(settled.device) for row in work.first], None, None))
        return engine.tell_everyone(work.written.to(settled.device), torch.add)

    return work.texts(engine.perform(step))


def _engine(settled: Settled, work: "_Work", given: Mapping[str, Any]) -> Engine:
    schedule, recorder = settled.schedule, given["recorder"]
    timeout = timedelta(seconds=float(given["timeout_s"]))
    plans = plan(schedule)
    wire = wire_for(plans, settled, given["group"], given["transport"], timeout)
    if recorder is not None:
        recorder.run_on(settled.device)
        recorder.edges, recorder.feedback = (), schedule.feedback
    return build_engine(
        schedule,
        plans,
        rank=settled.rank,
        stages={s: Stage(s, module, settled.device, False, None) for s, module in settled.modules.items()},
        weights={},
        wire=wire,
        device=settled.device,
        timeout=timeout,
        recorder=recorder,
        cluster=given["cluster"],
        executor=cast(type[Executor], partial(_Generating, work=work)),
    )


@dataclass
class _Work:
    """The text to generate.

    Attributes:
        groups: for each group the numbers of its prompts.
        first: for each group its prompts, (batch, length).
        written: for each prompt its new tokens plus one, as far as this rank has chosen them; else 0.
        caches: of the stages here, by stage and group, until the group is done.
    """

    groups: list[list[int]]
    first: list[Tensor]
    written: Tensor
    choose: Choose
    end: int | None
    cache: bool
    caches: dict[tuple[int, int], Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "_Work":
        prompts, size = given["prompts"], given["group_size"]
        groups: list[list[int]] = []
        for length in dict.fromkeys(map(len, prompts)):
            alike = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
            groups += [alike[at : at + size] for at in range(0, len(alike), size)]
        first = [torch.tensor([prompts[i] for i in each]) for each in groups]
        written = torch.zeros(len(prompts), given["n_tokens"], dtype=torch.int64)
        return cls(groups, first, written, given["choose"] or _most_likely, given["end"], given["cache"])

    def write(self, group: int, at: int, logits: Tensor) -> Tensor | None:
        """Choose the next token of each prompt; None when all of the group are done."""
        mine = self.groups[group]
        tokens = self.choose(logits)
        if not isinstance(tokens, Tensor) or tokens.shape != (len(mine),) or tokens.is_floating_point():
            raise ValueError(f"choose returned {tokens!r} for {len(mine)} prompts: return one token id for each")
        tokens = tokens.to(torch.int64)
        self.written[mine, at] = tokens.cpu() + 1
        if self.end is None:
            return tokens[:, None]
        over = (self.written[mine, : at + 1] == self.end + 1).any(dim=1)
        return None if bool(over.all()) else tokens[:, None]

    def texts(self, written: Tensor) -> list[list[int]]:
        """Return the new tokens of each prompt up to its end."""
        found = []
        for row in written.tolist():
            tokens = [token - 1 for token in row if token]
            found.append(tokens[: tokens.index(self.end) + 1] if self.end in tokens else tokens)
        return found


def _most_likely(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def _agree(ranks: Ranks, given: Mapping[str, Any]) -> tuple[_Work, list[int]]:
    """Agree on what to write and on the rank of each stage; or refuse on all ranks."""
    problem, work, here, facts = None, None, [ranks.rank], None
    try:
        check_arguments(generate, given)
        _refuse_odd_values(given)
        prompts = [[int(token) for token in prompt] for prompt in given["prompts"]]
        work = _Work.of({**given, "prompts": prompts})
        here = sorted(given["stages"]) if isinstance(given["stages"], Mapping) else here
        facts = {name: given[name] for name in ("n_tokens", "end", "group_size", "cache")}
        facts["prompts"] = prompts
        problem = _problem_of_stages(given["stages"], given["cache"])
    except WrongArgument as error:
        problem = str(error)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    ranks.refuse(problem)
    assert work is not None  # or all have refused
    assert facts is not None
    ranks.require_equal(facts)
    placed = rank_by_stage(ranks.gather(here))
    return work, [placed[stage] for stage in sorted(placed)]


def _refuse_odd_values(given: Mapping[str, Any]) -> None:
    for name in ("n_tokens", "group_size"):
        refuse_unless(given[name] >= 1, "generate", name, given[name], "give at least 1")
    end, prompts, n_tokens = given["end"], given["prompts"], given["n_tokens"]
    refuse_unless(end is None or end >= 0, "generate", "end", end, "give a token id, or None")
    refuse_unless(len(prompts) > 0, "generate", "prompts", prompts, "give at least one")
    most = MOST_FORWARDS // len(prompts)
    refuse_unless(n_tokens <= most, "generate", "n_tokens", n_tokens, f"give at most {most:,} for so many prompts")
    for number, prompt in enumerate(prompts):
        remedy = f"prompt {number} has no tokens: begin it with one, such as a mark for the beginning"
        refuse_unless(len(prompt) > 0, "generate", "prompts", prompts, remedy)


def _problem_of_stages(stages: Stages, cache: bool) -> str | None:
    if stages is None:
        return "stages is None: give this rank's module, or its modules by stage"
    named: Iterable[tuple[Any, Any]] = stages.items() if isinstance(stages, Mapping) else [("here", stages)]
    for stage, module in named:
        declared = declared_by(stage, module)
        if names := (*declared.reads, *declared.writes):
            return (
                f"stage {stage} reads or writes {names[0]!r} beyond its neighbours, which generate does not carry: "
                "pass it along, or take whole sequences with evaluate"
            )
        if cache and module is not None and not callable(getattr(module, "new_cache", None)):
            return (
                f"stage {stage} is a {type(module).__name__} without new_cache(): pass cache=False, or a module whose "
                "forward takes cache= (see generate)"
            )
    return None


class _Generating(Executor):
    """Forwards that keep keys and values; the last stage's token is what the first one goes on with."""

    def __init__(self, schedule: Schedule, *args: Any, work: _Work) -> None:
        self._work = work
        super().__init__(schedule, *args)

    def _forward(self, action: Action) -> _Call:
        stage, microbatch, work = action.stage, action.microbatch, self._work
        at, group = divmod(microbatch, self._schedule.feedback)
        before, product = Product("activation", stage - 1, microbatch), Product("activation", stage, microbatch)
        token_before = Product("token", self._last, microbatch - self._schedule.feedback)
        token, goes_on = Product("token", self._last, microbatch), microbatch + len(work.groups) < self._n

        def forward(batch: Batch) -> None:
            if stage:
                value = batch.products.pop(before)
            else:
                value = batch.inputs[group] if at == 0 else self._text(batch, group, batch.products.pop(token_before))
            made = None if value is None else self._called(stage, group, value)
            if stage == self._last and made is not None:
                made = work.write(group, at, _last_logits(made))
            if made is None or not goes_on:
                work.caches.pop((stage, group), None)
            if stage < self._last:
                batch.products[product] = made
            elif goes_on:
                batch.products[token] = made

        return forward

    @property
    def _n(self) -> int:
        return self._schedule.n_microbatches

    def _text(self, batch: Batch, group: int, token: Tensor | None) -> Tensor | None:
        """Return what the first stage is called with: the new token, or all tokens so far."""
        if token is None or self._work.cache:
            return token
        text = torch.cat((batch.outputs.get(group, batch.inputs[group]), token), dim=1)
        batch.outputs[group] = text
        return text

    def _called(self, stage: int, group: int, value: Any) -> Any:
        worker, caches = self._stages[stage], self._work.caches
        if worker.module is None or not self._work.cache:
            return worker.evaluate(value, None)[0]
        if (stage, group) not in caches:
            caches[stage, group] = cast(Any, worker.module).new_cache()
        return worker.evaluate(value, None, {"cache": caches[stage, group]})[0]


def _last_logits(output: Any) -> Tensor:
    """Return the logits of the last position, (batch, vocabulary)."""
    logits, shown = output, f" ({type(output).__name__})"
    if isinstance(output, Mapping):
        logits, shown = output.get("logits"), f" but {', '.join(map(repr, output)) or 'an empty dict'}"
    elif isinstance(output, tuple | list) and output:
        logits = output[0]
    if isinstance(logits, Tensor):
        shown = f" of shape {tuple(logits.shape)}"
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ValueError(f"the last stage returned no logits (batch, seq, vocabulary){shown}: give it the head")
    return logits[:, -1]
