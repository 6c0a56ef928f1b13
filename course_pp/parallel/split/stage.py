"""A stage of a model that somebody else wrote: the model's own forward, in which other stages' units are absent.

    stage 1 of a GPT-2 runs GPT2LMHeadModel.forward:
        wte, wpe, drop, h.0 … h.4      absent: return zeros that take the place of their results
        h.5                            absent: returns what it has returned on stage 0, which was received
        h.6 … h.11                     here
        ln_f                           absent: the stage is done, and sends the result of h.11

So masks and positions are computed where they are used, whatever the model does between its units; names are the
model's; and the shapes of a batch need not be those of the example.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from course_pp.parallel.meta_device import meta_copy
from course_pp.parallel.split.board import Board, Done
from course_pp.parallel.split.calls import Recording

__all__ = ["Absent", "SplitStage", "carve"]


class Absent(nn.Module):
    """A unit of another stage: without its parameters, otherwise as it was."""

    of_another_stage = True

    def __init__(self, name: str, unit: nn.Module, board: Board) -> None:
        super().__init__()
        self._unit, self._board = name, board
        self._twin = (meta_copy(unit),)  # in a tuple, so that its parameters are none of this stage's

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_twin"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the unit returned on its own stage, as far as anybody reads it."""
        return self._board.result(self._board.count(self._unit), self._twin[0], args, kwargs)

    def extra_repr(self) -> str:
        return f"{type(self._twin[0]).__name__} of another stage"


class SplitStage:
    """One stage of a model, and a module of the model's class; made by :func:`auto_split`.

    The first stage is called as the model is. It returns what the next is called with: the tensors of the model's own
    arguments, and the values that cross. The last returns what the model returns.
    """

    _board: Board
    ties: tuple[Mapping[int, str], ...]
    stage_id: int
    num_stages: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward as far as it is this stage's.

        Raises:
            ValueError: if the first stage's arguments are not those of the example; in training, if the model was cut
                in eval mode and could not be cut in training.
            OtherWay: if the model calls other units than it did for the example.
        """
        board, values = self._board, ()
        if board.recording.in_training and self.training:  # type: ignore[attr-defined]
            raise ValueError(
                f"this stage trains, and was cut in eval mode; in training {board.recording.in_training[0]}; or leave "
                "the stages in eval mode, without dropout"
            )
        if board.first:
            values, tensors = kwargs.pop("values"), board.inputs.receive(kwargs.pop("inputs"))
            args, given = board.inputs.call(tensors)
            kwargs = {**given, **kwargs}
        else:
            tensors = board.inputs.tensors(args, kwargs)
        board.begin(values)
        with ExitStack() as hooks:
            for handle in self._hooks():
                hooks.callback(handle.remove)
            try:
                output = super().forward(*args, **kwargs)  # type: ignore[misc]
            except Done:
                output = None
            finally:
                run, board.run = board.run, None
        if board.is_last:
            return output
        board.run = run
        return {"inputs": board.inputs.send(tensors), "values": board.finish()}

    def sent_for_example(self) -> tuple[Any, Any]:
        """Return what the stage is called with and what it sends for the model's example, as meta tensors."""
        return self._board.of_example()

    def keywords_of_example(self) -> list[str]:
        """Return the names of the example's keyword arguments."""
        return list(self._board.recording.example[1])

    def _hooks(self) -> Iterator[Any]:
        """Return the hooks for one forward. They are registered last, so that they see what the model sees."""
        board = self._board
        for name in board.units:
            unit = self.get_submodule(name)  # type: ignore[attr-defined]
            counts_itself = isinstance(vars(unit).get("_board"), Board)
            yield unit.register_forward_hook(_keeping(board, name, board.last if counts_itself else board.count))
        if board.first and board.recording.draws:
            name = board.recording.calls[board.first].unit
            unit, state = self.get_submodule(name), _random_state(self)  # type: ignore[attr-defined]
            yield unit.register_forward_pre_hook(_drawing_from(board, name, state))


def _keeping(board: Board, name: str, number: Callable[[str], int]) -> Callable[..., None]:
    return lambda _, args, output: board.keep(number(name), output)


def _drawing_from(board: Board, name: str, state: tuple[Tensor, Tensor | None]) -> Callable[..., None]:
    """Undo what the model draws before this stage's own part: the stages before have drawn it already."""

    def forget(_: nn.Module, args: Any) -> None:
        if board.upcoming(name) == board.first:
            torch.set_rng_state(state[0])
            if state[1] is not None:
                torch.cuda.set_rng_state(state[1])

    return forget


def _random_state(stage: Any) -> tuple[Tensor, Tensor | None]:
    on_gpu = any(parameter.is_cuda for parameter in stage.parameters())
    return torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None


def carve(model: nn.Module, recording: Recording, first: int, end: int) -> nn.Module:
    """Make the stage of calls ``first`` to ``end``, end excluded; its units are the model's own modules."""
    return _Carver(model, recording, first, end).stage()


class _Carver:
    def __init__(self, model: nn.Module, recording: Recording, first: int, end: int) -> None:
        self._model, self._board = model, Board(recording, first, end)
        self._here = set(self._board.units)
        if self._board.is_last:  # a unit that nobody calls has to be somewhere
            self._here |= recording.units.keys() - {call.unit for call in recording.calls}
        self._read = recording.parameters_read(first, end)
        self._units = {id(unit): name for name, unit in recording.units.items()}
        self._copies: dict[int, nn.Module] = {}

    def stage(self) -> nn.Module:
        kind, stage = type(self._model), self._on_the_way(self._model, "")
        stage.__class__ = type(f"{kind.__name__}Stage", (SplitStage, kind), {"__module__": kind.__module__})
        vars(stage)["_board"] = self._board
        return stage

    def _copy(self, module: nn.Module, name: str) -> nn.Module:
        if id(module) not in self._copies:
            self._copies[id(module)] = self._made(module, name)
        return self._copies[id(module)]

    def _made(self, module: nn.Module, name: str) -> nn.Module:
        unit = self._units.get(id(module))
        if unit is None:
            holds_units = any(id(part) in self._units for part in module.modules())
            return self._on_the_way(module, name) if holds_units else module
        if unit not in self._here:
            return self._absent(module, unit)
        return self._now_and_then(module, unit) if self._board.is_called_elsewhere(unit) else module

    def _absent(self, module: nn.Module, unit: str) -> nn.Module:
        absent = Absent(unit, module, self._board)
        for name, parameter in module._parameters.items():
            if f"{unit}.{name}" in self._read:
                absent._parameters[name] = parameter
        return absent

    def _now_and_then(self, module: nn.Module, unit: str) -> nn.Module:
        """Return a unit that several stages call; it is absent in the calls of other stages."""
        copied = _shallow(module)
        vars(copied).update(_board=self._board, _unit=unit, _twin=(meta_copy(module),))
        copied.forward = MethodType(_here_or_absent, copied)
        return copied

    def _on_the_way(self, module: nn.Module, name: str) -> nn.Module:
        """Return a module whose forward every stage runs, with those of its own parameters that this stage reads."""
        copied = _shallow(module)
        for key, parameter in module._parameters.items():
            path = f"{name}.{key}" if name else key
            if parameter is not None and path not in self._read:
                del copied._parameters[key]
                zeros: Any = parameter.detach().new_zeros(()).expand(parameter.shape)
                zeros.of_another_stage = True
                copied.register_buffer(key, zeros, persistent=False)
        for key, child in module._modules.items():
            if child is not None:
                copied._modules[key] = self._copy(child, f"{name}.{key}" if name else key)
        return copied


def _here_or_absent(self: Any, *args: Any, **kwargs: Any) -> Any:
    board: Board = self._board
    if board.run is not None:  # else it is computed again, for its backward
        number = board.count(self._unit)
        if not board.first <= number < board.end:
            return board.result(number, self._twin[0], args, kwargs)
    return type(self).forward(self, *args, **kwargs)


def _shallow(module: nn.Module) -> nn.Module:
    """Return a copy whose parameters, buffers and children can be replaced without changing the original's."""
    copied = type(module).__new__(type(module))
    vars(copied).update(
        {k: v.copy() if k.startswith("_") and isinstance(v, dict | set) else v for k, v in vars(module).items()}
    )
    hooks = [held for key, held in vars(copied).items() if key.endswith("_hooks")]
    for held in (vars(copied), *hooks):
        for key, value in list(held.items()):
            if isinstance(value, MethodType) and value.__self__ is module:
                held[key] = MethodType(value.__func__, copied)
    return copied
