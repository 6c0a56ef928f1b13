"""A good call of each public function of ``launch``, ``exercises``, ``notebook``, ``collective`` and ``loss``."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

from course_pp.model import CrossEntropy
from course_pp.schedule import build
from tests.odd_arguments.on_paper import SCHEDULE
from tests.odd_arguments.rows import Rows

ONE = build("1f1b", 1, 1)


def nothing(rank: int) -> None:
    """What a rank does."""


def grade(answer: Any) -> None:
    """Find nothing wrong."""


def launch_rows(folder: Path) -> Rows:
    script = folder / "script.py"
    script.write_text("")
    return {
        "Wait": {"rank": 0, "operation": "recv", "peers": (1,), "where": ""},
        "on_ranks": {"n": 1, "fn": nothing, "timeout_s": 9.0, "backend": None, "threads": 1, "where": "local"},
        "run_torchrun": {"args": [str(script)], "timeout_s": 9.0, "local": True, "where": "local"},
    }


def doctor_rows(folder: Path) -> Rows:
    return {
        "Finding": {"name": "", "ok": True, "says": "", "breaks": "", "remedy": ""},
        "examine": {},
    }


def exercise_rows(folder: Path) -> Rows:
    named = {"name": "nothing", "notebook": "00", "title": "One", "difficulty": 1, "minutes": 1, "hints": ("look",)}
    return {
        "Exercise": named | {"solution": nothing, "grade": grade, "limit_s": 5.0},
        "Progress": {"rows": (), "note": "", "quiz": {}},
        "Quiz": {"when": "before", "notebook": "", "given": (), "earlier": (), "note": ""},
        "Verdict": {
            "status": "correct",
            **dict.fromkeys(["heading", "symptom", "cause", "example", "printed", "next_step", "note"], ""),
        },
        "check": {"fn": nothing},
        "hint": {"exercise": "no such exercise"},
        "progress": {},
        "quiz": {"when": "before", "answers": "---", "notebook": "03"},
        "solution": {"exercise": "no such exercise"},
    }


def notebook_rows(folder: Path) -> Rows:
    return {
        "EmulatedRun": SCHEDULE["Timeline"] | {"memory": (), "losses": (), "unit_s": 1.0, "ledger": None},
        "ScratchFolder": {"prefix": "own", "beside": folder},
        "compare_gradients": {"schedules": [ONE]},
        "emulate": {
            "schedule": ONE,
            "cluster": None,
            "model": nn.Sequential(nn.Linear(32, 32)),
            "inputs": None,
            "targets": None,
            "recompute": False,
            "versions": None,
            "optimizer": None,
        },
        "reveal": {"what": "own", "guess": 1, "measured": 1, "unit": "", "how": "measured"},
    }


def collective_rows(folder: Path) -> Rows:
    return {
        "Ranks": {"group": None, "alone": False, "limit_s": None},
        "difference": {"facts": [{"a": 1}]},
        "rank_by_stage": {"held": [(0,), (1,)]},
    }


def loss_rows(folder: Path) -> Rows:
    of_a_microbatch = {
        "loss": CrossEntropy(),
        "output": torch.ones(1, 2, 3),
        "target": torch.ones(1, 2, dtype=torch.int64),
        "divisor": 1.0,
    }
    return {
        "counted": {"loss_fn": mse_loss, "samples": len},
        "loss_share": of_a_microbatch,
        "share_of": of_a_microbatch,
    }
