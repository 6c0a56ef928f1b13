"""How a function travels to the ranks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle ``(fn, args)``: what a cell or a script defines is sent whole, what is installed by name."""
    module = inspect.getmodule(fn)
    try:
        if module is None or not _is_script(module):
            return dumps((fn, args))
        with _by_value(module):
            return dumps((fn, args))
    except (Exception, SystemExit) as e:
        raise TypeError(
            f"{getattr(fn, '__name__', fn)!r} or its arguments cannot be sent to the ranks ({e}). "
            "Make what cannot be pickled (files, locks, connections) inside the function."
        ) from e


def dumps(value: object) -> bytes:
    """Pickle with cloudpickle, and also what it refuses: modules of a class of their own, as torch's settings are."""
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, obj: Any) -> Any:
            # cloudpickle sends along every loaded submodule whose name a function mentions, and knows plain modules
            # only: `dist` beside any `.config` would drag in torch.distributed.config, which is of a class of its own.
            if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
                return importlib.import_module, (obj.__name__,)
            # Left alone it is sent by its name, which no rank knows.
            if isinstance(obj, CACHED) and _is_sent_whole(obj.__wrapped__):
                return _cached, (obj.__wrapped__, obj.cache_parameters())
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()


CACHED = type(functools.cache(len))


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _is_sent_whole(fn: Any) -> bool:
    import cloudpickle

    name = getattr(fn, "__module__", None)
    return name not in sys.modules or name in ("__main__", *cloudpickle.list_registry_pickle_by_value())


def _is_script(module: ModuleType) -> bool:
    """Return whether the file is run rather than imported, and is sent whole, so that no rank has to import it.

    That is a file in no package which is not installed, and a test module, whose import would bring pytest along.
    """
    file = os.path.abspath(getattr(module, "__file__", None) or "")
    library = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    if module.__name__ == "__main__" or any(file.startswith(folder + os.sep) for folder in library):
        return False
    from_pytest = type(getattr(module, "__loader__", None)).__module__ == "_pytest.assertion.rewrite"
    return file.endswith(".py") and (from_pytest or not module.__package__)


@contextlib.contextmanager
def _by_value(module: ModuleType) -> Iterator[None]:
    import cloudpickle

    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
