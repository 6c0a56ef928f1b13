"""Mistake, which a grader raises, tables of causes, and the causes of exceptions and hangs.

The messages of torch and gloo name their own insides. Some words of each message identify it. If a
new version words the message anew, no cause is found for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from course_pp.launch.errors import COMPUTES, RETURNED

if TYPE_CHECKING:
    from course_pp.launch import Wait


class Mistake(Exception):
    """An answer is wrong.

    Attributes:
        symptom: sentence on the wrong result, names in backticks.
        cause: sentence on the likely cause, and where to look.
        example: a counter-example, of one line or several: input, result, right result.
    """

    def __init__(self, symptom: str, cause: str = "", example: str = "") -> None:
        super().__init__(symptom, cause, example)
        self.symptom = symptom
        self.cause = cause
        self.example = example

    def __str__(self) -> str:
        return " ".join(filter(None, (self.symptom, self.cause, self.example)))


class Stopped(Mistake):
    """An answer did not come back with a value.

    Attributes:
        how: ``"raised"``, ``"endless"`` (still running at the time limit), ``"exited"``,
            ``"died"``, ``"changed"`` (an argument), ``"unsendable"`` (its result), ``"parameters"``
            (others than the stub's) or ``"broken"``.
        row: number of the call, from 0; 0 on ranks.
        waits: call at which each rank stood at the time limit; empty unless that was reached.
        error: name of the class of the exception; empty where none was raised.
        peer: rank outside the group to which or from which a message was sent; None without one.
    """

    def __init__(
        self,
        how: str,
        symptom: str,
        cause: str = "",
        example: str = "",
        *,
        waits: tuple[Wait, ...] = (),
        error: str = "",
        peer: int | None = None,
    ) -> None:
        super().__init__(symptom, cause, example)
        # Unpickling calls the class with args: the exception comes from another process.
        self.args = (how, symptom, cause, example)
        self.how = how
        self.row = 0
        self.waits = waits
        self.error = error
        self.peer = peer


class Pending(Exception):
    """The answer raises NotImplementedError, so it is still the stub, whole or in part.

    Its text names the call; it is empty for the whole stub.
    """


Cause = str | Callable[..., str] | Sequence[tuple[bool | Callable[..., object], "Cause"]]
"""The likely cause of a mistake: a sentence, a function that writes it, or a table of causes.

A row of a table is (condition, cause). A condition is a function of the facts that the grader has
found, or a truth value. The last row, `OTHERWISE`, applies to everything.
"""

OTHERWISE = True


def why(cause: Cause, *facts: Any) -> str:
    """Return the sentence of a cause; of a table, the sentence of the first row that applies.

    Args:
        cause: a sentence, a function of ``facts``, or a table.
        facts: the arguments of each condition and of each function that writes a sentence.
    """
    if isinstance(cause, str):
        return cause
    if callable(cause):
        return cause(*facts)
    for condition, of_row in cause:
        if condition(*facts) if callable(condition) else condition:
            return why(of_row, *facts)
    return ""


_KNOWN: tuple[tuple[str, str], ...] = (
    ("grad can be implicitly created only for scalar outputs",
     "`backward()` without an argument starts from a single number, the loss. Any other tensor"
     " needs the gradient that came back for it: `output.backward(gradient)`."),
    ("does not require grad and does not have a grad_fn",
     "This backward starts from a tensor without a history: it was detached, or does not come from"
     " the model."),
    ("Trying to backward through the graph a second time",
     "A backward frees what its forward has kept: one backward for each forward, or"
     " `retain_graph=True` in the first of two."),
    ("modified by an inplace operation",
     "Somebody wrote to a tensor that this backward still needs. Work on a copy, or on memory of"
     " its own."),
    ("is being used in an in-place operation",
     "A tensor that wants a gradient cannot be written to: work on a copy, or detach it first."),
    ("Boolean value of Tensor with more than one value is ambiguous",
     "A tensor of several numbers is neither true nor false: ask it for `.any()` or `.all()`. Or a"
     " tensor stands here where a single number belongs: are the arguments in their order?"),
    ("not implemented for"
     " 'Long'", "Whole numbers stand here where floats belong: are the arguments in their order?"),
    ("Mismatch in shape: grad_output",
     "The gradient must have the shape of the tensor that its backward starts from: is that the"
     " stage's output?"),
    ("mat1 and mat2 shapes cannot be multiplied",
     "The layer was given a tensor of another width: is it the input that belongs to it?"),
    ("must match the size of tensor b",
     "Two tensors of different shapes meet here: compare what they are with what they should be, by"
     " their `.shape`."),
    ("FrozenInstanceError",
     "Nothing can be assigned to its fields: `dataclasses.replace(…)` makes another with some of"
     " them changed."),
    ("derivative for aten::floor_divide is not"
     " implemented", "`//` has no gradient: divide with `/`."),
    ("One of the differentiated Tensors does not require grad",
     "A gradient is asked for of a tensor that did not want one in the forward: `requires_grad_()`"
     " before it."),
    ("appears to not have been used in the graph",
     "The output was not computed from the tensor whose gradient is asked for: what was the forward"
     " given?"),
    ("must have the same dtype",
     "Two dtypes meet here: `torch.empty` and its like make float32 unless they are told"
     " `dtype=`."),
    ("Must specify global_rank or"
     " group_rank", "A message needs the rank at its other end: `dst=…` or `src=…`."),
    ("Expected parameter `tensor` of type torch.Tensor but got <class 'NoneType'>",
     "`None` was to be sent or received. A tensor's `.grad` is None until a backward has run, and"
     " stays None where that backward does not reach the tensor."),
    ("Expected parameter `tensor` of type torch.Tensor",
     "Only a tensor can be sent or received: are the arguments in their order?"),
    ("is not initialized in the world group map",
     '`group=` takes a process group: of a mesh, that of one dimension, `mesh.get_group("tp")`.'),
    ("input tensor has to be contiguous",
     "A message is read from one piece of memory, and this tensor is a view of something larger: is"
     " it the one that was to be sent? `.contiguous()` makes a copy in one piece."),
    ("has no gradient for"
     " rank", "Or no backward has run through it: until then its gradient is None."),
    *(
        (words,
         "`min` and `max` need something to choose from: say first what to return where nothing is"
         " left.")
        # Python 3.11's words, and those after it.
        for words in ("arg is an empty sequence", "iterable argument is empty")
    ),
    ("has changed the type of"
     " value", "A gradient keeps its dtype: return it in the dtype in which it came."),
    ("division by zero", "Look at what it is divided by: in this call that is 0."),
    ("list index out of"
     " range", "An index is past the end: a list of n entries has those from 0 to n - 1."),
    ("is invalid for input of"
     " size", "`view` and `reshape` keep the number of entries: compare the shapes."),
    ("zip() argument", "Lists of different lengths meet here: compare them by `len`."),
    *(
        (words,
         "The loss was given targets that do not belong to this output: compare their `.shape` and"
         " dtype.")
        for words in (
            "to match target batch_size",
            "1D target must have size",
            "floating point type for target with class probabilities",
            "expected target dtype to be",
        )
    ),
)  # fmt: skip


def cause_of(error: str) -> str:
    """Return the likely cause of an exception of torch or gloo; ``""`` for any other."""
    return next((cause for words, cause in _KNOWN if words in error), "")


_LOST = (
    "Either a message was never sent, or it was lost: it lives as long as the handle that `isend`"
    " or `send_activation` returns. Keep that, and `wait()` for it at the end."
)


def explained_in_line(stopped: Stopped) -> Mistake:
    """Explain a hang of stages in a line, one a rank, and also a message beyond the line's ends."""
    if stopped.peer is not None:
        cause = (
            "The last rank has nobody below it: it sends no activation and receives no gradient,"
            " `link.is_last`."
        )
        if stopped.peer < 0:
            cause = (
                "The first rank has nobody above it: it receives no activation and sends no"
                " gradient, `link.is_first`."
            )
        return Mistake(stopped.symptom, cause, stopped.example)
    return explained(stopped)


def explained(stopped: Stopped) -> Mistake:
    """Explain a hang by the messages of a pipeline's step; return any other `Stopped` as it is."""
    waiting = [wait for wait in stopped.waits if wait.peers]
    if not waiting:
        return stopped
    sending = [wait for wait in waiting if wait.operation == "send"]
    returned = {wait.rank for wait in stopped.waits if wait.operation == RETURNED}
    computing = {wait.rank for wait in stopped.waits if wait.operation == COMPUTES}
    unheard = [wait for wait in waiting if returned.intersection(wait.peers)]
    if any(computing.intersection(wait.peers) for wait in waiting):
        cause = (
            f"{stopped.cause} A rank that computes waits for nobody: does a loop of it never end?"
        )
    elif any(wait.operation == "send" for wait in unheard):
        cause = (
            f"{stopped.cause} Each message that is sent to it has to be received there, by a"
            " `recv_…` of its own."
        )
    elif unheard:
        cause = f"{stopped.cause} {_LOST}"
    # `where` is a line of the learner, because torch waits for a blocking send in the same way.
    elif any(".wait(" in wait.where for wait in sending):
        cause = (
            "To wait for a message at once is to send it blocking: wait after the last backward. Or"
            " nobody takes it: each forward and each backward receives one message."
        )
    elif sending:
        cause = (
            "A blocking `send` ends when its receiver takes the message, and that one is sending,"
            " too. Begin to send with `isend` or `send_activation`, and go on."
        )
    else:
        cause = f"Everyone receives, nobody sends. {_LOST}"
    return Mistake(stopped.symptom, cause, stopped.example)
