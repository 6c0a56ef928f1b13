"""The meaning of a training step, whichever engine runs it.

`course_pp.runtime` and `course_pp.parallel` run a step in two ways. Values between stages, the
batch, the loss, ties, hooks, random streams, the scaler and late weight gradients mean the same in
both, so they stand here once.
"""
