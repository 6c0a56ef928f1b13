"""A stage of a foreign model: the model's own forward, without other stages' units.

    stage 1 of a GPT-2 runs GPT2LMHeadModel.forward:
        wte, wpe, drop, h.0 … h.4      absent: return zeros that take the place of their results
        h.5                            absent: returns its result, received from stage 0
        h.6 … h.11                     here
        ln_f                           absent: the stage is done, and sends the result of h.11

So masks and positions are computed where they are used, whatever the model does between its units;
names are the model's; and the shapes of a batch need not be those of the example.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from course_pp.base.arguments import described
from course_pp.base.torch_private import (
    HookOfModule,
    own_children,
    own_parameters,
    tree_flatten,
    tree_unflatten,
)
from course_pp.parallel.meta_device import meta_copy, run_on_meta, to_meta
from course_pp.parallel.split.recording import Example, Output, Recording, tensors_in


class Done(BaseException):
    """Raised when the stage has made all it sends; no Exception, so that models do not catch it."""


class OtherWay(RuntimeError):
    """The model calls other units for a batch than it did for the example."""

    def __init__(self, unit: str, what: str) -> None:
        super().__init__(
            f"{unit!r} {what}: which units the model calls depends on its batch, so it was cut for"
            " another way through it; cut it with an example that goes this way, or put what"
            " branches into one module"
        )


class SplitStage:
    """One stage of a model, and a module of the model's class; made by :func:`auto_split`.

    The first stage is called as the model is. It returns what the next is called with: the tensors
    of the model's own arguments, and the values that cross. The last returns what the model
    returns.
    """

    _segment: "Segment"
    ties: tuple[Mapping[int, str], ...]
    stage_id: int
    num_stages: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward as far as it is this stage's.

        Raises:
            OtherWay: if the model calls other units than it did for the example.
        """
        here, values = self._segment, ()
        if here.recording.in_training and self.training:  # type: ignore[attr-defined]
            raise ValueError(
                "this stage trains, and was cut in eval mode; in training"
                f" {here.recording.in_training[0]}; or leave the stages in eval mode, without"
                " dropout"
            )
        if here.first:
            values = kwargs.pop("values")
            tensors = here.arguments.unpacked(kwargs.pop("inputs"), here.inputs_read)
            args, given = here.arguments.call(tensors)
            kwargs = {**given, **kwargs}
        else:
            tensors = here.arguments.tensors(args, kwargs)
        here.begin(values)
        with ExitStack() as hooks:
            for handle in self._hooks():
                hooks.callback(handle.remove)
            try:
                output = super().forward(*args, **kwargs)  # type: ignore[misc]
            except Done:
                output = None
            finally:
                run, here.run = here.run, None
        if here.is_last:
            return output
        assert run is not None
        for key in here.given:
            if key not in run.values:
                raise OtherWay(here.recording.calls[key.call].unit, "was not called")
        packed = here.arguments.packed(tensors, here.inputs_read_later)
        return {"inputs": packed, "values": tuple(run.values[key] for key in here.given)}

    def sent_for_example(self) -> tuple[Any, Any]:
        """Return the stage's input and output for the model's example, as meta tensors."""
        here, calls = self._segment, self._segment.recording.calls
        metas = here.arguments.of_example()
        values = tuple(calls[key.call].leaves[key.leaf] for key in here.taken)
        taken = (
            {"inputs": here.arguments.packed(metas, here.inputs_read), "values": values}
            if here.first
            else metas
        )
        sent = tuple(calls[key.call].leaves[key.leaf] for key in here.given)
        return taken, {
            "inputs": here.arguments.packed(metas, here.inputs_read_later),
            "values": sent,
        }

    def keywords_of_example(self) -> list[str]:
        return list(self._segment.recording.example[1])

    def _hooks(self) -> Iterator[Any]:
        """Register the hooks for one forward: last, so that they see what the model sees."""
        here = self._segment
        for name in here.units:
            unit = self.get_submodule(name)  # type: ignore[attr-defined]
            counts_itself = isinstance(vars(unit).get("_segment"), Segment)
            yield unit.register_forward_hook(
                _keeping(here, name, here.last if counts_itself else here.count)
            )
        if here.first and here.recording.draws:
            name = here.recording.calls[here.first].unit
            on_gpu = any(parameter.is_cuda for parameter in self.parameters())  # type: ignore[attr-defined]
            unit = self.get_submodule(name)  # type: ignore[attr-defined]
            yield unit.register_forward_pre_hook(_forgetting_draws(here, name, on_gpu))


def _keeping(here: "Segment", name: str, number: Callable[[str], int]) -> Callable[..., None]:
    return lambda _, args, output: here.keep(number(name), output)


def _forgetting_draws(here: "Segment", name: str, on_gpu: bool) -> Callable[..., None]:
    """Return a hook that undoes the random draws the model makes before this stage's own part.

    The stages before have made these draws already.
    """
    state, of_gpu = torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None

    def forget(_: nn.Module, args: Any) -> None:
        if here.upcoming(name) == here.first:
            torch.set_rng_state(state)
            if of_gpu is not None:
                torch.cuda.set_rng_state(of_gpu)

    return forget


class Absent(nn.Module):
    """A unit of another stage: without its parameters, otherwise as it was."""

    of_another_stage = True

    def __init__(self, name: str, unit: nn.Module, here: "Segment") -> None:
        super().__init__()
        self._unit, self._segment = name, here
        # in a tuple, so that its parameters are none of this stage's
        self._twin = (meta_copy(unit),)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_twin"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._segment.result(self._segment.count(self._unit), self._twin[0], args, kwargs)

    def extra_repr(self) -> str:
        return f"{type(self._twin[0]).__name__} of another stage"


def _here_or_absent(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a unit that several stages call: absent in the calls of other stages."""
    here: Segment = self._segment
    if here.run is not None:  # else it is computed again, for its backward
        number = here.count(self._unit)
        if not here.first <= number < here.end:
            return here.result(number, self._twin[0], args, kwargs)
    return type(self).forward(self, *args, **kwargs)


@dataclass
class _Run:
    """One forward of a stage: the values that cross its boundaries, and the calls of each unit."""

    values: dict[Output, Tensor]
    counts: dict[str, int] = field(default_factory=dict)


class Segment:
    """The calls of a recording that one stage makes: ``first`` to ``end``, end excluded.

    It receives the values ``taken`` and sends those ``given``; ``run`` is the forward that is under
    way. Into the tensors ``inputs_read`` of the model's arguments this stage or a later one looks,
    ``inputs_read_later`` a later one.
    """

    def __init__(self, recording: Recording, first: int, end: int) -> None:
        self.recording, self.first, self.end = recording, first, end
        self.is_last = end == len(recording.calls)
        self.units = recording.names(first, end)
        self.taken = recording.crossing(first)
        self.given = () if self.is_last else recording.crossing(end)
        self.arguments = _Arguments(recording.example)
        self.inputs_read, self.inputs_read_later = (
            recording.inputs_read(first),
            recording.inputs_read(end),
        )
        self.run: _Run | None = None
        self._numbers: dict[str, list[int]] = {}
        for number, call in enumerate(recording.calls):
            self._numbers.setdefault(call.unit, []).append(number)
        self._shapes: dict[int, dict[Any, tuple[Any, ...]]] = {
            number: {call.arguments: call.leaves} for number, call in enumerate(recording.calls)
        }

    def is_called_elsewhere(self, unit: str) -> bool:
        return not all(self.first <= number < self.end for number in self._numbers.get(unit, ()))

    def begin(self, received: tuple[Tensor, ...]) -> None:
        pairs = zip(self.taken, received, strict=True)
        # A received tensor is a leaf, which the model could not change in place.
        self.run = _Run({key: self._own(key, value) for key, value in pairs})

    def count(self, unit: str) -> int:
        number = self.upcoming(unit)
        assert self.run is not None
        self.run.counts[unit] = self.run.counts.get(unit, 0) + 1
        return number

    def upcoming(self, unit: str) -> int:
        """Return the number of the next call of ``unit``."""
        if self.run is None:
            raise RuntimeError(
                f"{unit!r} is of another stage, or between two: call the stage as a whole"
            )
        count, numbers = self.run.counts.get(unit, 0), self._numbers.get(unit, [])
        if count == len(numbers):
            raise OtherWay(unit, f"is called more than {count} times")
        return numbers[count]

    def last(self, unit: str) -> int:
        assert self.run is not None
        return self._numbers[unit][self.run.counts[unit] - 1]

    def result(self, number: int, twin: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the result of an absent unit, or raise Done after the stage's last call.

        Its tensors were received, or are zeros that nobody reads.
        """
        if number >= self.end:
            raise Done
        assert self.run is not None
        tensors = tensors_in((args, kwargs))
        received = {key.leaf: value for key, value in self.run.values.items() if key.call == number}
        if received and any(tensor.requires_grad for tensor in tensors):
            _refuse_reentrant_checkpoint(self.recording.calls[number].unit)
        device = next((tensor.device for tensor in (*received.values(), *tensors)), None)
        leaves = [
            (
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
                if isinstance(leaf, Tensor)
                else leaf
            )
            for leaf in self._shaped(number, twin, args, kwargs, tensors)
        ]
        for index, value in received.items():
            leaves[index] = value
        return tree_unflatten(leaves, self.recording.calls[number].tree)

    def keep(self, number: int, output: Any) -> None:
        """Keep the parts of a result that will be sent."""
        assert self.run is not None
        wanted = [key for key in self.given if key.call == number]
        leaves = tree_flatten(output)[0] if wanted else []
        self.run.values |= {key: self._own(key, leaves[key.leaf]) for key in wanted}

    def _own(self, key: Output, value: Tensor) -> Tensor:
        """Return the value, or a copy of it if the model changes it in place later.

        Each stage that uses the value makes the change for itself.
        """
        return value.clone() if key.call in self.recording.changed else value

    def _shaped(
        self, number: int, twin: nn.Module, args: Any, kwargs: Any, tensors: list[Tensor]
    ) -> tuple[Any, ...]:
        """Return the leaves of a result as meta tensors, found once for each shape of arguments."""
        key, known = tuple((tuple(t.shape), t.dtype) for t in tensors), self._shapes[number]
        if key not in known:
            args, kwargs = to_meta((args, kwargs))
            try:
                known[key] = run_on_meta(lambda: tuple(tree_flatten(twin(*args, **kwargs))[0]))
            except Exception as error:  # whatever a foreign forward raises
                unit = self.recording.calls[number].unit
                raise RuntimeError(
                    f"{unit!r} is of another stage, and does not say on the meta device what it"
                    " returns for arguments of other sizes than the example's: give auto_split an"
                    " example of this size"
                ) from error
        return known[key]


def _refuse_reentrant_checkpoint(unit: str) -> None:
    """Refuse a received value as a reentrant checkpoint's result: it would get no gradient."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            raise ValueError(
                f"{unit!r} is of another stage, and is called inside torch.utils.checkpoint with "
                "use_reentrant=True, which would compute it again in backward: checkpoint with "
                "use_reentrant=False"
            )
        frame = frame.f_back


class _Arguments:
    """The model's own arguments, as in its example.

    Every stage calls the model's forward with them.

    Their tensors go from stage to stage. If no later stage looks into a floating-point one, such as
    an image, only its shape goes, as a tensor without elements: the engines send nothing but
    tensors. Arguments that are no tensors stay as in the example.
    """

    def __init__(self, example: Example) -> None:
        self._leaves, self._tree = tree_flatten(example)
        self._kinds = [leaf.dtype for leaf in self._leaves if isinstance(leaf, Tensor)]

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors among the first stage's arguments.

        Refuse arguments unlike those of the example.
        """
        leaves, tree = tree_flatten((args, dict(sorted(kwargs.items()))))
        if tree != self._tree:
            raise ValueError(
                f"called with {_spelled(args, kwargs)}, but the example was"
                f" {_spelled(*tree_unflatten(self._leaves, self._tree))}: give auto_split an"
                " example of these arguments"
            )
        for given, known in zip(leaves, self._leaves, strict=True):
            if isinstance(given, Tensor) != isinstance(known, Tensor) or not _is_as(given, known):
                raise ValueError(
                    f"called with {_told(given)} where the example had {_told(known)}: every stage"
                    " counts on it, so cut the model with an example that is like the batches"
                )
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def call(self, tensors: tuple[Tensor, ...]) -> Example:
        """Return the example's arguments with these tensors in place of its own."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = tree_unflatten(leaves, self._tree)
        return args, kwargs

    def of_example(self) -> tuple[Tensor, ...]:
        return tuple(leaf.to("meta") for leaf in self._leaves if isinstance(leaf, Tensor))

    def packed(self, tensors: tuple[Tensor, ...], read: set[int]) -> tuple[Tensor, ...]:
        """What goes to a stage from which on the tensors number ``read`` are looked into."""
        return tuple(
            (
                torch.empty((0, *tensor.shape), dtype=torch.int8, device=tensor.device)
                if _is_shape(i, tensor.dtype, read)
                else tensor
            )
            for i, tensor in enumerate(tensors)
        )

    def unpacked(self, tensors: tuple[Tensor, ...], read: set[int]) -> tuple[Tensor, ...]:
        """Return the tensors that came packed, with zeros for those that nobody looks into."""
        return tuple(
            (
                torch.zeros((), dtype=kind, device=tensor.device).expand(tensor.shape[1:])
                if _is_shape(i, kind, read)
                else tensor
            )
            for i, (tensor, kind) in enumerate(zip(tensors, self._kinds, strict=True))
        )


def _is_shape(index: int, dtype: torch.dtype, read: set[int]) -> bool:
    return index not in read and (dtype.is_floating_point or dtype.is_complex)


def _is_as(given: Any, known: Any) -> bool:
    if isinstance(known, Tensor):
        return (
            given.dim() == known.dim()
            and given.dtype.is_floating_point == known.dtype.is_floating_point
        )
    return type(given) is type(known) and (given is known or bool(given == known))


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return described(value)
    return f"a tensor of {str(value.dtype).removeprefix('torch.')} and {value.dim()} dimensions"


def _spelled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    words = [
        *map(described, args),
        *(f"{name}={described(value)}" for name, value in kwargs.items()),
    ]
    return f"({', '.join(words)})"


def carve(model: nn.Module, recording: Recording, first: int, end: int) -> nn.Module:
    """Return the stage of calls ``first`` to ``end``, end excluded.

    Its units are the model's own modules, not copies.
    """
    return _Carver(model, recording, first, end).stage()


class _Carver:
    def __init__(self, model: nn.Module, recording: Recording, first: int, end: int) -> None:
        self._model, self._segment = model, Segment(recording, first, end)
        self._here = set(self._segment.units)
        if self._segment.is_last:  # a unit that nobody calls has to be somewhere
            self._here |= recording.units.keys() - {call.unit for call in recording.calls}
        self._read = recording.parameters_read(first, end)
        self._units = {id(unit): name for name, unit in recording.units.items()}
        self._copies: dict[int, nn.Module] = {}

    def stage(self) -> nn.Module:
        kind = type(self._model)
        of_stage = type(
            f"{kind.__name__}Stage", (SplitStage, kind), {"__module__": kind.__module__}
        )
        stage = self._on_the_way(self._model, "", of_stage)
        vars(stage)["_segment"] = self._segment
        return stage

    def _copy(self, module: nn.Module, name: str) -> nn.Module:
        if id(module) not in self._copies:
            self._copies[id(module)] = self._made(module, name)
        return self._copies[id(module)]

    def _made(self, module: nn.Module, name: str) -> nn.Module:
        unit = self._units.get(id(module))
        if unit is None:
            holds_units = any(id(part) in self._units for part in module.modules())
            return self._on_the_way(module, name, type(module)) if holds_units else module
        if unit not in self._here:
            absent = Absent(unit, module, self._segment)
            read = {
                key: p for key, p in own_parameters(module).items() if f"{unit}.{key}" in self._read
            }
            own_parameters(absent).update(read)
            return absent
        if not self._segment.is_called_elsewhere(unit):
            return module
        copied = _shallow(module, type(module))
        vars(copied).update(_segment=self._segment, _unit=unit, _twin=(meta_copy(module),))
        copied.forward = MethodType(_here_or_absent, copied)
        return copied

    def _on_the_way(self, module: nn.Module, name: str, kind: type[nn.Module]) -> nn.Module:
        """Return a copy of a module whose forward every stage runs.

        It keeps those of its own parameters that this stage reads.
        """
        copied = _shallow(module, kind)
        for key, parameter in own_parameters(module).items():
            path = f"{name}.{key}" if name else key
            if parameter is not None and path not in self._read:
                del own_parameters(copied)[key]
                zeros: Any = parameter.detach().new_zeros(()).expand(parameter.shape)
                zeros.of_another_stage = True
                copied.register_buffer(key, zeros, persistent=False)
        for key, child in own_children(module).items():
            if child is not None:
                own_children(copied)[key] = self._copy(child, f"{name}.{key}" if name else key)
        return copied


def _shallow(module: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Return a copy of ``module`` of class ``kind``.

    Replacing the parameters, buffers or children of the copy leaves the original as it was.
    """
    copied = kind.__new__(kind)
    vars(copied).update(vars(module))
    # Only torch's own containers are copied: another dict of the module may be shared on purpose.
    of_torch = [name for name, held in vars(nn.Module()).items() if isinstance(held, dict | set)]
    for name in of_torch:
        vars(copied)[name] = vars(module)[name].copy()
    hooks = [vars(copied)[name] for name in of_torch if name.endswith("_hooks")]
    for held in (vars(copied), *hooks):
        held.update({key: _rebound(value, module, copied) for key, value in held.items()})
    return copied


def _rebound(value: Any, module: nn.Module, copied: nn.Module) -> Any:
    """Return a method or a hook of ``module`` as one of ``copied``; any other value as it is."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, copied)
    if isinstance(value, HookOfModule):
        hook = _rebound(value.hook, module, copied)
        return HookOfModule(hook, copied if value.with_module else None)
    return value
