"""Imports are most of a short run, and looking for garbage among them is a third of that."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """Keep the garbage collector away from what is imported inside: meanwhile, later, and when the
    process ends.

    torch makes hundreds of thousands of objects, and none of them is ever garbage. What else exists
    when the block ends is passed over, too, until ``gc.unfreeze()``: use it where a program begins.
    ``gc.get_objects()`` lists none of it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def imports_that_warn() -> Iterator[None]:
    """Keep warnings of the log quiet inside: torchao, also when transformers loads it, names each
    GPU's library there that it cannot load.
    """
    told = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(told)
