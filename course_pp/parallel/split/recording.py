"""A record of a model run on an example: the calls of its units, and the readers of each result.

Units are the modules that one stage holds as a whole; a model is cut between them.

    GPT2LMHeadModel            on the way to a list of blocks: every stage runs its forward
      transformer              likewise
        wte, wpe, drop         units
        h ── 0, 1, 2, …        units: the members of a list of like modules
        ln_f                   a unit
      lm_head                  a unit

A module without parameters whose result depends on no unit, such as one that computes rotary angles
from positions, is not a unit: every stage computes it for itself.

Each tensor is known by its storage, and each storage by what it was computed from: inputs of the
model, outputs of calls, parameters. What a unit does inside is its own; between the units every
operation hands on what its arguments were computed from. Nothing is compiled or exported, so the
model may do what it likes in Python.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import sep
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from course_pp.base.torch_private import (
    TorchDispatchMode,
    asks_for_number,
    declared_arguments,
    is_compiled_in_place,
    kinds_of_dropout,
    own_children,
    storage_key,
    tree_flatten,
    tree_map,
)
from course_pp.parallel.blocks import runs_of_like_modules
from course_pp.parallel.meta_device import has_no_weights, run_operation, to_meta, without_numbers

Example = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call of the model, positional and keyword."""


class Output(NamedTuple):
    """Tensor number ``leaf`` of what call number ``call`` returned."""

    call: int
    leaf: int


class Input(NamedTuple):
    """Tensor number ``leaf`` of what the model is called with."""

    leaf: int


class Parameter(NamedTuple):
    """A parameter or buffer, by its first name, that the model uses outside of its units."""

    name: str


@dataclass(frozen=True)
class Problem:
    """Something that a stage could not do as the whole model does.

    Attributes:
        kind: a word or two, such as ``hidden state``.
        line: ``file:line`` of the model's code.
        what: what happens there.
        remedy: what to do.
    """

    kind: str
    line: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.line}: {self.kind}: {self.what}; {self.remedy}"


Source = Output | Input | Parameter | Problem
"""A thing a value was computed from.

No stage could reproduce a problem; it counts only if the value is read.
"""


@dataclass(frozen=True)
class Call:
    """One call of a unit, by its name."""

    unit: str
    reads: frozenset[Source]  # what its arguments were computed from
    arguments: tuple[Any, ...]  # shape and dtype of each tensor among them
    leaves: tuple[Any, ...]  # of what it returned; a tensor is a meta tensor
    tree: Any  # how the leaves go together


@dataclass
class Recording:
    """A model's run on an example."""

    units: Mapping[str, nn.Module]
    calls: list[Call] = field(default_factory=list)
    result_reads: frozenset[Source] = frozenset()  # what the model's result was computed from
    # calls whose outputs the model then changes in place
    changed: set[int] = field(default_factory=set)
    draws: bool = False  # random numbers outside of its units
    problems: list[Problem] = field(default_factory=list)
    # what would stop a cut in training mode alone
    in_training: list[Problem] = field(default_factory=list)
    example: Example = ((), {})

    def reads_from(self, first: int) -> frozenset[Source]:
        return self.result_reads.union(*(call.reads for call in self.calls[first:]))

    def crossing(self, cut: int) -> tuple[Output, ...]:
        """Return the values that a cut before call number ``cut`` has to carry, in order."""
        return tuple(
            sorted(s for s in self.reads_from(cut) if isinstance(s, Output) and s.call < cut)
        )

    def inputs_read(self, first: int) -> set[int]:
        """Return which tensors of the model's arguments calls from ``first`` on look into."""
        return {source.leaf for source in self.reads_from(first) if isinstance(source, Input)}

    def parameters_read(self, first: int, end: int) -> set[str]:
        """Return the names of the parameters that the model itself uses for these calls.

        The calls are ``first`` to ``end``, end excluded. Parameters that only units use are not
        among them.
        """
        reads = frozenset[Source]().union(*(call.reads for call in self.calls[first:end]))
        reads |= self.result_reads if end == len(self.calls) else frozenset()
        return {source.name for source in reads if isinstance(source, Parameter)}

    def names(self, first: int, end: int) -> list[str]:
        return list(dict.fromkeys(call.unit for call in self.calls[first:end]))


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may be units, by their first name, in the model's order."""
    on_the_way = _ancestors(model)
    found: dict[str, nn.Module] = {}
    seen: set[nn.Module] = set()
    for name, part in model.named_modules():
        for child, module in own_children(part).items() if name in on_the_way else ():
            path = f"{name}.{child}" if name else child
            if module is not None and path not in on_the_way and module not in seen:
                seen.add(module)
                found[path] = module
    return found


def replaced_on_the_way(model: nn.Module) -> str | None:
    """Return the name of a module on the way whose forward was replaced.

    A copy of such a module would run the whole model.

    ``torch.compile`` and accelerate's hooks put such a forward on the module itself; on a unit it
    does no harm.
    """
    for name in sorted(_ancestors(model)):
        part = model.get_submodule(name)
        forward = vars(part).get("forward")
        is_own = forward is None or getattr(forward, "__self__", None) is part
        if not is_own or is_compiled_in_place(part):
            return name
    return None


def _ancestors(model: nn.Module) -> set[str]:
    """Return the names of the model and of all modules on the way to a list of blocks.

    The lists themselves are among them.
    """
    found = {""}
    for run in runs_of_like_modules(model):
        for parts in (name.split(".") for name in run):
            found |= {".".join(parts[:end]) for end in range(1, len(parts))}
    # A module's second name, such as that of an encoder's embedding, leads the same way.
    ways = {id(model.get_submodule(name)) for name in found}
    return {name for name, part in model.named_modules(remove_duplicate=False) if id(part) in ways}


_PLAIN = (Tensor, bool, int, float, str, type(None))
_NOTHING: frozenset[Source] = frozenset()
_DATA_OPS = {torch.ops.aten.nonzero, torch.ops.aten.masked_select}


def as_call(example: Any) -> Example:
    """Return an example as positional and keyword arguments.

    A tuple or list holds the positional ones, a dict the keyword ones; anything else is the only
    argument.
    """
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return ((), dict(sorted(example.items()))) if isinstance(example, Mapping) else ((example,), {})


def record(model: nn.Module, example: Example) -> Recording:
    """Run ``model`` on ``example`` without gradients, and record the calls of its units.

    The model's buffers and the random numbers stay as they were.
    """
    units = _candidates(model)
    # Which stage runs a dropout decides who draws which numbers, so one is a unit in any case.
    random = kinds_of_dropout()
    undecided = {
        name: unit
        for name, unit in units.items()
        if next(unit.parameters(), None) is None
        and not any(isinstance(part, random) for part in unit.modules())
    }
    if undecided:
        decided = {name: unit for name, unit in units.items() if name not in undecided}
        independent = _run(model, example, decided, undecided).independent
        units = {name: unit for name, unit in units.items() if name not in independent}
    recording = _run(model, example, units, {}).recording
    if not model.training:
        # What stops a cut in training mode alone: above all, drawing random numbers.
        modes = [(part, part.training) for part in model.modules()]
        try:
            found = _run(model.train(), example, units, {}).recording.problems
            recording.in_training = [each for each in found if each not in recording.problems]
        except Exception:
            # one sequence may be too few for a norm of batches: nothing is known then
            recording.in_training = []
        finally:
            for part, mode in modes:
                part.training = mode
    return recording


def _run(
    model: nn.Module, example: Example, units: dict[str, nn.Module], undecided: dict[str, nn.Module]
) -> "_Watch":
    on_meta = any(tensor.is_meta for tensor in tensors_in(example))
    with left_as_it_was(model), torch.no_grad(), ExitStack() as hooks:
        if not on_meta and has_no_weights(model):
            hooks.enter_context(without_numbers(model, units))
        watch = _Watch(model, Recording(units, example=example), undecided)
        args, kwargs = watch.take_inputs(example)
        for name, unit in {**units, **undecided}.items():
            for handle in watch.hooks_on(name, unit):
                hooks.callback(handle.remove)
        with watch:
            output = model(*args, **kwargs)
    watch.take_result(output)
    return watch


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Give buffers, and the random generators, their values back."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng([*devices]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


class _Watch(TorchDispatchMode):
    def __init__(
        self, model: nn.Module, recording: Recording, undecided: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.recording, self._undecided = recording, undecided
        self.independent = set(undecided)
        self._sources: dict[int, frozenset[Source]] = {}
        self._inside: dict[int, int] = {}  # storages made within a call and not returned by it
        # storages that are one in the model: results are copied here
        self._same: dict[int, set[int]] = {}
        self._kept: list[Any] = []  # alive, so that no storage gets another's number
        self._open: list[_Open] = []
        self._opaque: dict[int, str] = {}
        self._decided_by = _NOTHING
        self._looking = True
        self._device = next(
            (leaf.device for leaf in tensors_in(recording.example)), torch.device("cpu")
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._set(tensor, frozenset({Parameter(name)}))

    def take_inputs(self, example: Example) -> Example:
        tensors = tensors_in(example)
        copies = {id(tensor): tensor.clone() for tensor in tensors}
        for index, tensor in enumerate(tensors):
            self._set(copies[id(tensor)], frozenset({Input(index)}))
        return tree_map(lambda leaf: copies.get(id(leaf), leaf), example)

    def take_result(self, output: Any) -> None:
        self.recording.result_reads = self._read_by(tensors_in(output))

    def hooks_on(self, name: str, unit: nn.Module) -> Iterator[Any]:
        if name in self._undecided:
            yield unit.register_forward_hook(lambda _, args, output: self._judge(name, output))
        else:
            yield unit.register_forward_pre_hook(
                lambda _, args, kwargs: self._enter(name, unit, (args, kwargs)), with_kwargs=True
            )
            yield unit.register_forward_hook(lambda _, args, output: self._leave(output))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = run_operation(func, args, kwargs or {})
        if not self._looking:
            return output
        arguments, results, written = (
            tensors_in((args, kwargs)),
            tensors_in(output),
            _written(func, args, kwargs or {}),
        )
        if self._open:
            self._see_inside(arguments, results, written)
        else:
            self._see_between(func, arguments, results, written)
        return output

    def _see_between(
        self, func: Any, arguments: list[Tensor], results: list[Tensor], written: list[Tensor]
    ) -> None:
        for tensor in arguments:
            if storage_key(tensor) in self._inside:
                self._refuse_hidden(self._inside[storage_key(tensor)])
        sources = _NOTHING.union(*map(self._of, arguments))
        for tensor in written:
            self._see_change(
                tensor,
                "a tensor that one module returns and another hands on",
                spares=storage_key(tensor),
            )
            self._set(tensor, self._of(tensor) | sources)
        for tensor in results:
            if not any(tensor is each for each in written):
                self._set(tensor, sources | self._of(tensor))
        if asks_for_number(func) or func.overloadpacket in _DATA_OPS:
            self._decided_by |= {source for source in sources if not isinstance(source, Problem)}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.recording.draws = True
            what = "random numbers are drawn between modules, and every stage would draw others"
            drawn = _problem("random numbers", what, "draw them in a module, such as nn.Dropout")
            for tensor in (*results, *written):
                self._set(tensor, self._of(tensor) | {drawn})

    def _see_inside(
        self, arguments: list[Tensor], results: list[Tensor], written: list[Tensor]
    ) -> None:
        now = self._open[-1]
        for tensor in arguments:
            key = storage_key(tensor)
            if key in now.allowed:
                continue
            if key in self._inside and self._inside[key] != len(self.recording.calls):
                self._refuse_hidden(self._inside[key])
                continue
            for source in self._of(tensor):
                if isinstance(source, Output):
                    self._refuse_hidden(source.call)
                elif isinstance(source, Parameter):
                    what = f"{now.unit!r} uses {source.name!r}, which it does not hold"
                    remedy = (
                        f"make it a parameter of {now.unit!r}, the same object, so that it is tied"
                    )
                    self._refuse("borrowed weight", what, remedy)
        for tensor in written:
            if any(isinstance(source, Output | Input) for source in self._of(tensor)):
                self._see_change(tensor, f"what {now.unit!r} is called with")
        for tensor in results:
            if storage_key(tensor) not in self._sources:
                self._kept.append(tensor)
                self._inside.setdefault(storage_key(tensor), len(self.recording.calls))

    def _link(self, one: Tensor, other: Tensor) -> None:
        """Note that two storages count as one: a unit may return its own argument."""
        self._kept += [one, other]
        together = set[int]().union(
            *(self._same.get(key, {key}) for key in (storage_key(one), storage_key(other)))
        )
        self._same |= dict.fromkeys(together, together)

    def _see_change(self, tensor: Tensor, what: str, spares: int | None = None) -> None:
        """Note that ``tensor`` is changed in place.

        Nothing that shares its storage may be used afterwards, except ``spares``.
        """
        said = f"{what} is changed in place and used afterwards"
        spoiled = _problem(
            "changed in place", said, "change a copy, or use only what the module returns"
        )
        for key in self._same.get(storage_key(tensor), {storage_key(tensor)}):
            sources = self._sources.get(key, _NOTHING)
            self.recording.changed |= {
                source.call for source in sources if isinstance(source, Output)
            }
            if key != spares:
                self._sources[key] = sources | {spoiled}

    def _enter(self, name: str, unit: nn.Module, given: Any) -> Any:
        tensors = tensors_in(given)
        if self._open:
            outer, remedy = (
                self._open[-1].unit,
                "let each hold modules of its own, or put both into one",
            )
            self._refuse(
                "nested call", f"{outer!r} calls {name!r}, which the model calls itself", remedy
            )
        reads = self._read_by(tensors)
        allowed = {
            storage_key(tensor) for tensor in (*tensors, *unit.parameters(), *unit.buffers())
        }
        on_meta = has_no_weights(unit) and self._device.type != "meta"
        if on_meta:
            given = self._on_meta(given, allowed)
        self._open.append(
            _Open(name, reads, allowed, tuple((tuple(t.shape), t.dtype) for t in tensors), on_meta)
        )
        return given if on_meta else None

    def _on_meta(self, given: Any, allowed: set[int]) -> Any:
        """Return meta copies of the arguments of a unit without weights.

        A change to a copy counts as a change to its original.
        """
        self._looking = False
        copies = to_meta(given)
        self._looking = True
        for tensor, copy in zip(tensors_in(given), tensors_in(copies), strict=True):
            self._set(copy, self._of(tensor))
            self._link(tensor, copy)
            allowed.add(storage_key(copy))
        return copies

    def _leave(self, output: Any) -> Any:
        now, call = self._open.pop(), len(self.recording.calls)
        if self._open:  # the call of the outer unit covers a unit inside its forward
            return None
        own: dict[int, Tensor] = {}

        def mine(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in own:
                own[id(leaf)] = (
                    torch.zeros_like(leaf, device=self._device) if now.on_meta else leaf.clone()
                )
                self._link(leaf, own[id(leaf)])
            return own[id(leaf)]

        self._looking = False
        output = tree_map(mine, output)
        self._looking = True
        leaves, tree = tree_flatten(output)
        opaque = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)]
        self._opaque |= {call: opaque[0]} if opaque else {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._set(leaf, self._of(leaf) | {Output(call, index)})
        shapes = tuple(
            torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in leaves
        )
        self.recording.calls.append(Call(now.unit, now.reads, now.arguments, shapes, tree))
        return output

    def _read_by(self, tensors: list[Tensor]) -> frozenset[Source]:
        """Return the sources from which tensors, as they are used now, were computed."""
        sources = _NOTHING.union(self._decided_by, *map(self._of, tensors))
        problems = [source for source in sources if isinstance(source, Problem)]
        self.recording.problems += [
            each for each in problems if each not in self.recording.problems
        ]
        return sources.difference(problems)

    def _judge(self, name: str, output: Any) -> None:
        tensors = tensors_in(output)
        if any(isinstance(source, Output) for tensor in tensors for source in self._of(tensor)):
            self.independent.discard(name)

    def _of(self, tensor: Tensor) -> frozenset[Source]:
        return self._sources.get(storage_key(tensor), _NOTHING)

    def _set(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        self._kept.append(tensor)
        self._sources[storage_key(tensor)] = sources

    def _refuse_hidden(self, call: int) -> None:
        unit = self.recording.calls[call].unit
        kind = self._opaque.get(call)
        if kind is not None:
            what = f"{unit!r} returns a {kind}, in which torch's pytree sees no tensors"
            self._refuse(
                "unknown container", what, "return a tuple or a dict, or register it with pytree"
            )
            return
        what = f"a tensor that {unit!r} made is used, but did not come from it as its result"
        self._refuse("hidden state", what, f"return it from {unit!r} and pass it on as an argument")

    def _refuse(self, kind: str, what: str, remedy: str) -> None:
        problem = _problem(kind, what, remedy)
        if problem not in self.recording.problems:
            self.recording.problems.append(problem)


@dataclass
class _Open:
    """A call that has begun.

    ``allowed`` are the storages it may use: those of its arguments, and its own.
    """

    unit: str
    reads: frozenset[Source]
    allowed: set[int]
    arguments: tuple[Any, ...]
    on_meta: bool


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a value, through its containers."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found = []
    for place, each in enumerate(declared_arguments(func)):
        if each.alias_info is not None and each.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(each.name)
            found += tensors_in(value)
    return found


def _problem(kind: str, what: str, remedy: str) -> Problem:
    """Return a problem at the line of the model's code that runs now.

    It is the innermost line of the call stack that is in the model's files.
    """
    frame = sys._getframe()
    while frame.f_back is not None and not is_of_model(frame.f_code.co_filename):
        frame = frame.f_back
    return Problem(kind, f"{frame.f_code.co_filename}:{frame.f_lineno}", what, remedy)


_HERE = Path(__file__).parents[1]
_NOT_OF_MODEL = (
    f"{torch.__path__[0]}{sep}",
    f"{_HERE}{sep}",
    f"{_HERE.with_name('base')}{sep}",
    "<",
)


def is_of_model(path: str) -> bool:
    return not path.startswith(_NOT_OF_MODEL)
