"""Begins the process that ranks are forked from: ``python -P boot.py SOCKET``, with ``sys.path`` on standard input.

An argument has at most 128 KiB, which some paths exceed.
"""

import json
import sys

# A rank that spawns processes of its own has them run this file under another name.
if __name__ == "__main__":
    sys.path[:] = json.load(sys.stdin)
    from course_pp.launch.server import serve

    serve(int(sys.argv[1]))
