"""A folder for the files of a notebook. It is removed when the kernel ends, however it ends."""

import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from course_pp.base.arguments import checked

# This program runs in a session of its own, where neither Ctrl-C nor a signal to the kernel's group
# arrives. If the kernel is killed, its end of the pipe closes. A child of the kernel may hold that
# end open, so the program also looks whether the kernel is still its parent. It removes the folder
# several times, because ranks that are about to end may write a little longer.
_REMOVE_WHEN_ALONE = """
import os, select, shutil, sys, time
folder, starter = sys.argv[1], int(sys.argv[2])
while os.getppid() == starter and not select.select([0], [], [], 0.5)[0]:
    pass
for _ in range(8):
    shutil.rmtree(folder, ignore_errors=True)
    time.sleep(0.25)
"""


@checked
class ScratchFolder:
    """A folder beside the notebook, where every node of a cluster sees it.

    The folder is removed with this object: when the name is bound again, and when the kernel is
    restarted, shut down or killed. Another process watches for that.

    Args:
        prefix: beginning of the folder's name.
        beside: folder in which to make it; unless given, the current one.
    """

    path: Path

    def __init__(self, prefix: str, beside: str | os.PathLike[str] | None = None) -> None:
        place = Path.cwd() if beside is None else Path(beside)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=place)).resolve()
        except OSError as error:
            raise ValueError(
                f"cannot make a folder for runs in {str(place)!r} ({error.strerror}): open the"
                " notebook in a folder that you can write, such as the working copy of make lab,"
                " or name another one (beside)"
            ) from error
        # -I -S: the program needs no package, and starts sooner without a look at them.
        program = [sys.executable, "-I", "-S", "-c", _REMOVE_WHEN_ALONE]
        watcher = subprocess.Popen(
            [*program, str(self.path), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _let_go, watcher, os.getpid())

    @checked
    def fresh(self, name: str, copy_of: str | os.PathLike[str] | None = None) -> Path:
        """Return a folder in this one without files of an earlier run, so a cell can run again.

        A folder that has this ``name`` is removed first. The new one is empty, or begins as a copy
        of ``copy_of``.
        """
        target = self.path / name
        if name in ("", ".", "..") or target.parent != self.path:
            raise ValueError(
                f"name is {name!r}, no name of a folder in {self.path.name}: give one, such as"
                " 'run'"
            )
        if copy_of is not None and not Path(copy_of).is_dir():
            raise ValueError(
                f"there is no folder {Path(copy_of).name!r} to copy: first run the cell that"
                " writes it"
            )
        if copy_of is not None and Path(copy_of).resolve().is_relative_to(target):
            raise ValueError(
                f"copy_of is {name!r} or in it, which is removed first: give the copy another name"
            )
        shutil.rmtree(target, ignore_errors=True)
        if copy_of is None:
            target.mkdir(parents=True)
        else:
            shutil.copytree(copy_of, target)
        return target

    def remove(self) -> None:
        """Remove the folder now, and wait until it is gone. It is safe to call this repeatedly."""
        self._end()


def _let_go(watcher: "subprocess.Popen[bytes]", starter: int) -> None:
    if os.getpid() != starter:
        return  # this is a fork of the kernel, which has a copy of the folder's object
    assert watcher.stdin is not None
    # Closing alone does nothing while a fork of the kernel holds the pipe open, so write a byte.
    with suppress(BrokenPipeError):
        watcher.stdin.write(b".")
        watcher.stdin.close()
    watcher.wait()
