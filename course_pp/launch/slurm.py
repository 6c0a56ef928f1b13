"""A job of ours as its starter sees it: its place in the queue, and how it ended."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence

from course_pp.launch.errors import LaunchError
from course_pp.launch.guard import NAME, SESSIONS, sent_from

_ANSWER_LIMIT_S = 5.0
# Every user's looks at the queue end at one controller: the longer a job has waited, the rarer they
# are.
_FIRST_LOOK_S, _LOOK_S, _RAREST_LOOK_S = 0.3, 2.0, 30.0
# Who holds the cores is told to those who wait longer than a job takes to start, and is no news for
# a while.
_HELD_FIRST_S, _HELD_S, _MOST_HOLDERS = 2.0, 60.0, 3
_COMPLETING_S = 3.0
_REASONS = {
    "Resources": "it begins when enough of the nodes is free",
    "Priority": "jobs of higher priority come first",
    "ReqNodeNotAvail": "nodes it needs are down or reserved",
    "PartitionTimeLimit": "its time limit is above the partition's",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to one job",
    "PartitionDown": "the partition is closed",
    "PartitionInactive": "the partition is closed",
    "BadConstraints": "no node has what it asks for",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such quality of service",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as you may",
    "AssocGrpGRES": "your account's GPUs are all in use",
    "BeginTime": "it begins later",
}
# Slurm refuses such a request only where EnforcePartLimits is set, and else queues it, for ever.
_INCURABLE = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|PartitionDown|PartitionInactive|BadConstraints|InvalidAccount|InvalidQOS"
    r"|(?:Assoc|QOS)Max\w*PerJob\w*"
)
_INCURABLE_LOOKS = 2
_QUEUED, _BOOTING = "PD", "CF"
# The last word of a job, and what to make of it.
_STATES = {
    "TIMEOUT": (
        "reached its time limit in Slurm. Raise time_limit in site.toml, or do less in one run."
    ),
    "NODE_FAIL": (
        "lost a node. Run it again; if it happens again, tell whoever runs the cluster which node"
        " it was."
    ),
    "CANCELLED": "was cancelled from outside, by scancel or by an administrator.",
    "PREEMPTED": "was pre-empted by a job of higher priority. Run it again.",
    "OUT_OF_MEMORY": (
        'used more memory than it had asked for. Ask for more: options = ["--mem=…"] in site.toml.'
    ),
    "DEADLINE": "could not end before its deadline.",
}
_SAID = (
    ("DUE TO TIME LIMIT", "TIMEOUT"),
    ("DUE TO NODE FAILURE", "NODE_FAIL"),
    ("Node failure on", "NODE_FAIL"),
    ("DUE TO PREEMPTION", "PREEMPTED"),
    ("oom.kill", "OUT_OF_MEMORY"),
)
_REFUSED = re.compile(
    r"srun: error: Unable to (?:allocate resources|create step for job \d+|confirm"
    r" allocation[^:]*): (.*)"
)
_OF_A_TASK = re.compile(r"srun: error: .*\btasks? [\d,-]+: ")
_FAILED_TASK = re.compile(_OF_A_TASK.pattern + "Exited with exit code")
_NEWS = re.compile(r"srun: job \d+ (queued and waiting for|has been allocated) resources")
_SETTINGS = (
    '`sinfo -o "%P %D %c %G"` shows partitions, their nodes, cores and GPUs; partition, account,'
    " time_limit, gres and options are set in site.toml."
)


class Job:
    """One job, known by the session that sends it until Slurm has told its number; or a step ``inside`` that job."""

    def __init__(self, session: int, environ: Mapping[str, str], inside: str | None = None) -> None:
        self.session = session
        self.number = inside
        self.step = inside is not None
        self.started = self.step
        self._environ = environ
        self._next_look = time.monotonic() + _FIRST_LOOK_S
        self._pause_s = _LOOK_S
        self._incurable_looks = 0
        self._last_line = self._last_held = ""
        self._next_held = time.monotonic() + _HELD_FIRST_S

    @property
    def called(self) -> str:
        """``Slurm job 12``, ``the run in Slurm job 12``, or ``the Slurm job`` as long as it has no number."""
        who = f"Slurm job {self.number}" if self.number else "the Slurm job"
        return f"the run in {who}" if self.step else who

    def queue_line(self) -> str | None:
        """Return where the job stands in the queue, and a line on who holds the cores; asks Slurm
        now and then.

        Each is returned only if it has changed; None if neither has.

        Raises LaunchError where Slurm keeps the job in the queue for a reason that waiting does not
        cure.
        """
        if self.started or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RAREST_LOOK_S)
        number = self._found()
        rows = (
            self._ask("squeue", "--noheader", f"--jobs={number}", "-o", "%t|%P|%r")
            if number
            else []
        )
        if not rows or rows[0].count("|") < 2:
            return None
        state, partition, reason = rows[0].split("|", 2)
        self.started = state not in (_QUEUED, _BOOTING)
        if self.started:
            return None
        if state == _BOOTING:
            return self._news(f"job {number}: its nodes are starting")
        self._incurable_looks = self._incurable_looks + 1 if _INCURABLE.match(reason) else 0
        if self._incurable_looks == _INCURABLE_LOOKS:
            raise LaunchError(
                f"Slurm cannot run this: partition {partition}{_because(reason)}. {_SETTINGS}"
            )
        how = "" if self._last_line else "; interrupt the cell to cancel it"
        place = self._place(number, partition)
        line = self._news(
            f"job {number} waits in partition {partition}: {place}{_because(reason)}", how
        )
        return "\n".join(filter(None, (line, self._held(partition)))) or None

    def look_soon(self) -> None:
        """Have the next `queue_line` ask Slurm: srun has just said how the job gets on."""
        self._next_look, self._pause_s = 0.0, _LOOK_S

    def _news(self, line: str, more: str = "") -> str | None:
        news, self._last_line = line != self._last_line, line
        return line + more if news else None

    def seconds_left(self) -> float:
        """Return the seconds until Slurm ends the job; 0 if it does not say, or the job is gone."""
        rows = self._ask("squeue", "--noheader", f"--jobs={self._found()}", "-o", "%L")
        if rows and rows[0].strip() in ("UNLIMITED", "NOT_SET"):
            return float("inf")
        match = re.fullmatch(
            r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", rows[0].strip() if rows else ""
        )
        if match is None:
            return 0.0
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds

    def _found(self) -> str:
        """Return the number of the job, which may have begun or ended before the first look; empty if none."""
        if self.number is None:
            self.number = next(
                iter(sent_from(self.session, self._ask(*SESSIONS, "--states=all"))), None
            )
        return self.number or ""

    def _place(self, number: str, partition: str) -> str:
        queue = self._ask(
            "squeue",
            "--noheader",
            f"--partition={partition}",
            "--states=PD",
            "--sort=-p,i",
            "-o",
            "%i",
        )
        return (
            f"place {queue.index(number) + 1} of {len(queue)}"
            if number in queue
            else "place unknown"
        )

    def _held(self, partition: str) -> str | None:
        """Return who holds the partition's cores, if it is time to tell and it is not what was told last."""
        if time.monotonic() < self._next_held:
            return None
        self._next_held = time.monotonic() + _HELD_S
        there = f"--partition={partition}"
        cores = [line.split("/") for line in self._ask("sinfo", "--noheader", there, "--format=%C")]
        if not cores:
            return None
        jobs = self._ask("squeue", "--noheader", there, "--states=R,CG", "-o", "%i|%U|%u|%C|%N|%j")
        try:
            taken, _, out, total = (sum(map(int, column)) for column in zip(*cores, strict=True))
            holders = _holders([job.split("|", 5) for job in jobs], taken)
        except (ValueError, IndexError):  # a line that is none of these: no reason to end the wait
            return None
        away = f", {out} out of service" if out else ""
        line = f"{taken} of {total} cores are taken{away}{holders}."
        news, self._last_held = line != self._last_held, line
        return line if news else None

    def verdict(
        self, said: Sequence[str], asked: str, a_rank_failed: bool, a_rank_spoke: bool = False
    ) -> LaunchError | None:
        """Return why Slurm itself ended the run; None if it only passes on that the command failed.

        ``said`` are lines of srun and slurmstepd. Where a rank has failed, that one is to be named
        instead.
        """
        text = "\n".join(said)
        state = "" if self.step else self._state()
        state = next((known for words, known in _SAID if re.search(words, text)), state)
        # Where one task fails, srun cancels the others in the same words.
        blamed = a_rank_failed or _FAILED_TASK.search(text)
        if (
            state not in _STATES
            and not blamed
            and ("CANCELLED AT" in text or "has been revoked" in text)
        ):
            state = "CANCELLED"
        if state in _STATES:
            return LaunchError(f"{self.called} {_STATES[state]}")
        if match := _REFUSED.search(text):
            return LaunchError(
                f"Slurm refused the request: {match[1]}. It was: {asked}. {_SETTINGS}"
            )
        own = [line for line in said if not is_news(line)]
        if (
            own
            and all(
                line.startswith(("srun: ", 'Try "srun ')) and not _OF_A_TASK.match(line)
                for line in own
            )
            and not a_rank_spoke
        ):
            lines = "\n".join(own)
            return LaunchError(f"srun refused to start: {asked}. {_SETTINGS} It said:\n{lines}")
        return None

    def _state(self) -> str:
        if not (number := self._found()):
            return ""
        limit = time.monotonic() + _COMPLETING_S
        while True:
            match = re.search(
                r"JobState=(\w+)", "\n".join(self._ask("scontrol", "show", "job", number))
            )
            state = match[1] if match else ""
            # Nodes still clean up after it; what it ended with is said afterwards.
            if state != "COMPLETING" or time.monotonic() > limit:
                return state
            time.sleep(_FIRST_LOOK_S)

    def _ask(self, *argv: str) -> list[str]:
        """Return the lines of an answer; none if there is no answer, which is no reason to give up."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            answer = subprocess.run(
                argv,
                env=self._environ,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER_LIMIT_S,
            )
            if not answer.returncode:
                return answer.stdout.split("\n")[:-1]
        return []


def is_news(line: str) -> bool:
    """Return whether srun only says how the job gets on in the queue."""
    return bool(_NEWS.match(line))


def _holders(jobs: Sequence[Sequence[str]], taken: int) -> str:
    """Return who has so many cores, given jobs of (number, user's number, user's name, cores, nodes, name)."""
    held: dict[str, list[Sequence[str]]] = {}
    for job in jobs:
        held.setdefault("yours" if job[1] == str(os.getuid()) else job[2], []).append(job)
    cores = {who: sum(int(job[3]) for job in theirs) for who, theirs in held.items()}
    # Ours first, then whoever holds most.
    order = sorted(held, key=lambda who: (who != "yours", -cores[who]))
    parts = []
    for who in order[:_MOST_HOLDERS]:
        nodes = sorted({job[4] for job in held[who]})
        where = ", ".join(nodes[:_MOST_HOLDERS]) + (", …" if len(nodes) > _MOST_HOLDERS else "")
        n = len(held[who])
        parts.append(f"{cores[who]} by {n} {'job' if n == 1 else 'jobs'} of {who} on {where}")
    if others := order[_MOST_HOLDERS:]:
        parts.append(f"{sum(cores[who] for who in others)} by {len(others)} more users")
    if (hidden := taken - sum(cores.values())) > 0:
        parts.append(
            f"{hidden} by jobs of other partitions, or that this cluster does not show you"
        )
    ours = [job[0] for job in held.get("yours", ()) if job[5] == NAME]
    remedy = (
        f". Restarting a notebook's kernel ends its job, as does `scancel {' '.join(ours)}`"
        if ours
        else ""
    )
    return (f": {'; '.join(parts)}" if parts else "") + remedy


def _because(reason: str) -> str:
    meaning = _REASONS.get(reason.split(",")[0])
    return f" ({reason}: {meaning})" if meaning else f" ({reason})"
