"""A folder for what a notebook writes, which goes when its kernel does, however that ends."""

import os
import shutil
import subprocess
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from course_pp.base.arguments import checked

# Runs in a session of its own, where neither Ctrl-C nor a signal to the kernel's group arrives. A
# killed kernel says nothing: its end of the pipe closes. What it forked may hold that end open,
# hence the look at the parent too. Ranks that are about to end may write a little longer, hence the
# repeats.
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
    """Make a folder beside the notebook, where every node of a cluster sees it; it is removed when
    this object goes.

    That is when the name is bound again, when the kernel is restarted or shut down, and when it is
    killed: another process watches. ``prefix`` begins its name; ``beside`` is the folder to make it
    in, the current one unless given.
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
        argv = [
            sys.executable,
            "-I",
            "-S",
            "-c",
            _REMOVE_WHEN_ALONE,
            str(self.path),
            str(os.getpid()),
        ]
        quiet = subprocess.DEVNULL
        watcher = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )
        self._end = weakref.finalize(self, _let_go, watcher, os.getpid())

    @checked
    def fresh(self, name: str, copy_of: str | os.PathLike[str] | None = None) -> Path:
        """Return a folder in this one that holds nothing of an earlier run, so that a cell can be
        run again.

        What already has this ``name`` is removed first. The new one is empty, or starts with a
        ``copy_of`` another.
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
        """Remove the folder now, and wait until it is gone; safe to call repeatedly."""
        self._end()


def _let_go(watcher: "subprocess.Popen[bytes]", starter: int) -> None:
    if os.getpid() != starter:
        return  # a fork of the kernel, which has a copy of the folder's object
    assert watcher.stdin is not None
    # Closing alone says nothing while a fork holds the pipe open too.
    with suppress(BrokenPipeError):
        watcher.stdin.write(b".")
        watcher.stdin.close()
    watcher.wait()
