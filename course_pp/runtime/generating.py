"""Text from a pipeline: prompts take turns, so that every rank has one to work on.

A token goes from the last stage back to the first, which meanwhile works on other prompts, in the
order that :func:`course_pp.schedule.generation` gives.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from course_pp.base.arguments import check_arguments, refuse_below, refuse_unless
from course_pp.base.ranks import rank_by_stage
from course_pp.runtime.agreement import Agreement, PipelineOptions, Stages, agree, ranks_of
from course_pp.runtime.batch import Cut
from course_pp.runtime.emulation import EmulatedCluster
from course_pp.runtime.executor import Executor, StepState, _Call
from course_pp.runtime.gradients import ShardedStages
from course_pp.runtime.messages import plan_messages
from course_pp.runtime.recorder import Recorder
from course_pp.runtime.stage import Stage
from course_pp.runtime.wire import open_wire
from course_pp.schedule import Action, Product, generation
from course_pp.schedule.edges import declared_by


def generate(
    stages: Stages,
    prompts: Sequence[Sequence[int]],
    n_tokens: int,
    *,
    choose: Callable[[Tensor], Tensor] | None = None,
    end: int | None = None,
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

    Give at least as many prompts as there are stages: one alone keeps one rank busy at a time.

    Args:
        stages: this rank's modules, as for :class:`Pipeline`. The first stage is called with token
            ids (1, seq); the last stage returns logits (1, seq, vocabulary), alone, first in a
            tuple, or as ``logits`` of a dict.
        prompts: token ids, the same on every rank; their lengths may differ.
        choose: a function from logits (1, vocabulary) to a token id (1,), called on the last
            stage's rank; the most likely token unless given.
        end: the token after which a prompt is done.
        cache: keep keys and values in each stage, so that a token costs one position. Every stage
            then needs a method ``new_cache()`` and takes its result as ``cache=``, like stages of
            :mod:`course_pp.model`. If False, the whole text goes through all stages for each token,
            and any stages will do, such as stages of :func:`course_pp.parallel.auto_split`.

    Other arguments, and the exceptions on every rank, are those of :class:`Pipeline`.

    Returns:
        The new tokens of each prompt, ``end`` included, on every rank. Modules stay in the mode
        they are in.
    """
    ranks = ranks_of(group)
    given = locals()

    def look() -> tuple[list[list[int]], list[int]]:
        check_arguments(generate, given)
        refuse_below(1, "generate", n_tokens=n_tokens)
        refuse_unless(len(prompts) > 0, "generate", "prompts", prompts, "give at least one")
        for number, prompt in enumerate(prompts):
            remedy = (
                f"prompt {number} has no tokens: begin it with one, such as a mark for the"
                " beginning"
            )
            refuse_unless(len(prompt) > 0, "generate", "prompts", prompts, remedy)
        if problem := _problem_of_stages(stages, cache):
            raise ValueError(problem)
        plain = [list(map(int, prompt)) for prompt in prompts]
        return plain, sorted(stages) if isinstance(stages, Mapping) else [ranks.rank]

    prompts, here = ranks.collectively(look)
    ranks.require_equal({"n_tokens": n_tokens, "end": end, "cache": cache, "prompts": prompts})
    placed = rank_by_stage(ranks.gather(here))
    placement = [placed[stage] for stage in sorted(placed)]
    order = generation(ranks.size, len(prompts), n_tokens, placement=placement)
    text = _Text(prompts, n_tokens, choose or partial(torch.argmax, dim=-1), end)
    options = PipelineOptions(
        order,
        stages,
        group=group,
        device=device,
        tied=(),
        recorder=recorder,
        cluster=cluster,
        transport=transport,
        timeout_s=timeout_s,
    )
    agreement = agree(options, feeds_tokens_back=True)
    executor = _Generating(agreement, text, cache)

    def step() -> Tensor:
        with ShardedStages(agreement.modules.values()).reduced_once(trains=False), torch.no_grad():
            tokens = [torch.tensor([prompt], device=agreement.device) for prompt in prompts]
            executor.run(StepState(Cut(inputs=tokens, targets=(), kwargs=(), form=("whole", 0))))
        return executor.tell_everyone(text.written.to(agreement.device), torch.add)

    return text.up_to_the_end(executor.perform(step))


class _Text:
    """The text that is generated.

    Attributes:
        written: each prompt's new tokens plus 1, (prompts, tokens); 0 where this rank chose none.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], n_tokens: int, choose: Any, end: int | None
    ) -> None:
        self.written = torch.zeros(len(prompts), n_tokens, dtype=torch.int64)
        self._choose = choose
        self._end = end

    def write(self, prompt: int, at: int, logits: Tensor) -> Tensor | None:
        """Choose token ``at`` of a prompt; return it, (1, 1), or None if the prompt is done."""
        token = self._choose(logits)
        if not isinstance(token, Tensor) or token.shape != (1,) or token.is_floating_point():
            raise ValueError(
                f"choose returned {token!r} for logits (1, vocabulary): return one token id, (1,)"
            )
        self.written[prompt, at] = int(token) + 1
        return None if int(token) == self._end else token[:, None].to(torch.int64)

    def up_to_the_end(self, written: Tensor) -> list[list[int]]:
        """Return the new tokens of each prompt, given the sum of all ranks' ``written``."""
        found = []
        for row in written.tolist():
            tokens = [token - 1 for token in row if token]
            if self._end in tokens:
                tokens = tokens[: tokens.index(self._end) + 1]
            found.append(tokens)
        return found


def _problem_of_stages(stages: Stages, cache: bool) -> str | None:
    named: Mapping[Any, Any] = stages if isinstance(stages, Mapping) else {"here": stages}
    for stage, module in named.items():
        declared = declared_by(stage, module)
        if names := (*declared.reads, *declared.writes):
            return (
                f"stage {stage} reads or writes {names[0]!r} beyond its neighbours, which generate"
                " does not carry: pass it along, or take whole sequences with evaluate"
            )
        if cache and module is not None and not callable(getattr(module, "new_cache", None)):
            return (
                f"stage {stage} is a {type(module).__name__} without new_cache(): pass cache=False,"
                " or a module whose forward takes cache= (see generate)"
            )
    return None


class _Generating(Executor):
    """Forwards that keep keys and values; the last stage's token goes to the first stage."""

    def __init__(self, agreement: Agreement, text: _Text, has_caches: bool) -> None:
        self._text = text
        self._has_caches = has_caches
        # The caches of this rank's stages by stage and prompt, until the prompt is done.
        self._caches: dict[tuple[int, int], Any] = {}
        stages = {}
        for index, module in agreement.modules.items():
            stages[index] = Stage(
                index, module, device=agreement.device, recompute=False, meter=None
            )
        plans = plan_messages(agreement.schedule)
        wire = open_wire(agreement, plans)
        super().__init__(agreement, agreement.schedule, plans, wire=wire, stages=stages, weights={})

    def _forward(self, action: Action) -> _Call:
        stage, microbatch = action.stage, action.microbatch
        n_prompts = self._schedule.feedback
        at, prompt = divmod(microbatch, n_prompts)
        before = Product("activation", stage - 1, microbatch)
        product = Product("activation", stage, microbatch)
        token_before = Product("token", self._last, microbatch - n_prompts)
        token = Product("token", self._last, microbatch)
        goes_on = microbatch + n_prompts < self._schedule.n_microbatches

        def forward(state: StepState) -> None:
            if stage:
                value = state.products.pop(before)
            else:
                value = state.given.inputs[prompt] if at == 0 else state.products.pop(token_before)
                if at and value is not None and not self._has_caches:
                    # Without a cache the stage needs all tokens so far, not the new one alone.
                    earlier = state.outputs.get(prompt, state.given.inputs[prompt])
                    value = torch.cat((earlier, value), dim=1)
                    state.outputs[prompt] = value
            made = None if value is None else self._called(stage, prompt, value)
            if stage == self._last and made is not None:
                made = self._text.write(prompt, at, _last_logits(made))
            if made is None or not goes_on:
                self._caches.pop((stage, prompt), None)
            if stage < self._last:
                state.products[product] = made
            elif goes_on:
                state.products[token] = made

        return forward

    def _called(self, stage: int, prompt: int, value: Any) -> Any:
        worker = self._stages[stage]
        kept = {}
        if worker.module is not None and self._has_caches:
            if (stage, prompt) not in self._caches:
                self._caches[stage, prompt] = cast(Any, worker.module).new_cache()
            kept = {"cache": self._caches[stage, prompt]}
        return worker.evaluate(value, None, kept)[0]


def _last_logits(output: Any) -> Tensor:
    """Return the logits of the last position, (batch, vocabulary)."""
    logits = output
    if isinstance(output, Mapping):
        logits = output.get("logits")
    elif isinstance(output, tuple | list) and output:
        logits = output[0]
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        made = f"a {type(output).__name__}"
        if isinstance(output, Mapping):
            made = f"{[*output]}"
        elif isinstance(logits, Tensor):
            made = f"shape {tuple(logits.shape)}"
        raise ValueError(
            f"the last stage returned {made}, no logits (batch, seq, vocabulary): give it the head"
        )
    return logits[:, -1]
