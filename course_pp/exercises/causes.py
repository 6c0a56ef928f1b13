"""What an exception of torch or gloo means to the person who wrote the line.

Their messages name their own insides. Each is recognised by words of theirs; one that is reworded loses its cause.
"""

from __future__ import annotations

_KNOWN: tuple[tuple[str, str], ...] = (
    (
        "grad can be implicitly created only for scalar outputs",
        "`backward()` without an argument starts from a single number, the loss. Any other tensor needs the gradient "
        "that came back for it: `output.backward(gradient)`.",
    ),
    (
        "does not require grad and does not have a grad_fn",
        "This backward starts from a tensor without a history: it was detached, or does not come from the model.",
    ),
    (
        "Trying to backward through the graph a second time",
        "A backward frees what its forward has kept: one backward for each forward, or `retain_graph=True` in the "
        "first of two.",
    ),
    (
        "modified by an inplace operation",
        "Somebody wrote to a tensor that this backward still needs. Work on a copy, or on memory of its own.",
    ),
    (
        "is being used in an in-place operation",
        "A tensor that wants a gradient cannot be written to: work on a copy, or detach it first.",
    ),
    (
        "Boolean value of Tensor with more than one value is ambiguous",
        "A tensor of several numbers is neither true nor false: ask it for `.any()` or `.all()`. Or a tensor stands "
        "here where a single number belongs: are the arguments in their order?",
    ),
    (
        "not implemented for 'Long'",
        "Whole numbers stand here where floats belong: are the arguments in their order?",
    ),
    (
        "Mismatch in shape: grad_output",
        "The gradient must have the shape of the tensor that its backward starts from: is that the stage's output?",
    ),
    (
        "mat1 and mat2 shapes cannot be multiplied",
        "The layer was given a tensor of another width: is it the input that belongs to it?",
    ),
    (
        "must match the size of tensor b",
        "Two tensors of different shapes meet here: compare what they are with what they should be, by their `.shape`.",
    ),
    (
        "derivative for aten::floor_divide is not implemented",
        "`//` has no gradient: divide with `/`.",
    ),
    (
        "One of the differentiated Tensors does not require grad",
        "A gradient is asked for of a tensor that did not want one in the forward: `requires_grad_()` before it.",
    ),
    (
        "appears to not have been used in the graph",
        "The output was not computed from the tensor whose gradient is asked for: what was the forward given?",
    ),
    (
        "must have the same dtype",
        "Two dtypes meet here: `torch.empty` and its like make float32 unless they are told `dtype=`.",
    ),
    (
        "Must specify global_rank or group_rank",
        "A message needs the rank at its other end: `dst=…` or `src=…`.",
    ),
    (
        "Expected parameter `tensor` of type torch.Tensor but got <class 'NoneType'>",
        "`None` was to be sent or received. A tensor's `.grad` is None until a backward has run, and stays None where "
        "that backward does not reach the tensor.",
    ),
    (
        "Expected parameter `tensor` of type torch.Tensor",
        "What is sent or received has to be a tensor: are the arguments in their order?",
    ),
    (
        "is not initialized in the world group map",
        '`group=` takes a process group: of a mesh, that of one dimension, `mesh.get_group("tp")`.',
    ),
    (
        "input tensor has to be contiguous",
        "A message is read from one piece of memory, and this tensor is a view of something larger: is it the one that "
        "was to be sent? `.contiguous()` makes a copy in one piece.",
    ),
    (
        "has no gradient for rank",
        "Or no backward has run through it: until then its gradient is None.",
    ),
    *(
        (words, "The loss was given targets that do not belong to this output: compare their `.shape` and dtype.")
        for words in (
            "to match target batch_size",
            "1D target must have size",
            "floating point type for target with class probabilities",
            "expected target dtype to be",
        )
    ),
)


def cause_of(error: str) -> str:
    """A sentence or two for the message of an exception, ``""`` if it is none of these."""
    return next((cause for words, cause in _KNOWN if words in error), "")
