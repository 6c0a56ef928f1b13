"""Imports are most of a short run, and looking for garbage among them is a third of that."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """Keep the garbage collector away from objects that are imported inside.

    It leaves them alone meanwhile, later, and when the process ends.

    torch makes hundreds of thousands of objects, and none of them is ever garbage. All other
    objects that exist when the block ends are passed over, too, until ``gc.unfreeze()``, so use it
    where a program begins. ``gc.get_objects()`` lists none of them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


class MissingExtra(ModuleNotFoundError):
    """A package that only a part of course_pp needs is not installed; the text names its extra."""


@contextmanager
def imports_of_extra(extra: str) -> Iterator[None]:
    """Name the extra of course_pp to install if an import in the block does not find its package.

    Raises:
        MissingExtra: instead of ModuleNotFoundError, of which it is a subclass.
    """
    try:
        yield
    except MissingExtra:
        raise  # an import further inside has named its own extra
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "course_pp"):
            raise
        text = f"{package} is not installed: pip install 'course_pp[{extra}]'"
        raise MissingExtra(text, name=error.name) from None


@contextmanager
def imports_that_warn() -> Iterator[None]:
    """Keep warnings of the log quiet inside.

    torchao, also when transformers loads it, names each of its GPU libraries that it cannot load.
    """
    told = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(told)
