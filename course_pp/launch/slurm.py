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
# All users ask one controller, so we look at the queue the more rarely the longer a job has waited.
_FIRST_LOOK_S = 0.3
_LOOK_S = 2.0
_RAREST_LOOK_S = 30.0
# A job that starts at once needs no line on who holds the cores. Later, one a minute is enough.
_HELD_FIRST_S = 2.0
_HELD_S = 60.0
_MOST_HOLDERS = 3
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
# A job with one of these reasons never starts. Slurm refuses it only where EnforcePartLimits is
# set, and else queues it for ever.
_INCURABLE = re.compile(
    r"PartitionTimeLimit|PartitionNodeLimit|PartitionDown|PartitionInactive|BadConstraints"
    r"|InvalidAccount|InvalidQOS|(?:Assoc|QOS)Max\w*PerJob\w*"
)
# One look may fall on a moment at which the cluster is being changed.
_INCURABLE_LOOKS = 2
_QUEUED, _BOOTING = "PD", "CF"
# The last state of a job, and its meaning and remedy.
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
    """One job, or a step of the job ``inside``.

    A job is known by the session that sends it until Slurm has told its number.
    """

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
        """``Slurm job 12``, ``the run in Slurm job 12``, or ``the Slurm job`` without a number."""
        name = f"Slurm job {self.number}" if self.number else "the Slurm job"
        return f"the run in {name}" if self.step else name

    def queue_line(self) -> str | None:
        """Return the job's place in the queue, and a line on who holds the cores.

        Slurm is asked now and then only. A line is left out if it has not changed; None if neither
        has. Raises LaunchError if Slurm keeps the job in the queue for a reason that waiting does
        not cure.
        """
        if self.started or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RAREST_LOOK_S)

        number = self._found()
        if not number:
            return None
        rows = self._ask("squeue", "--noheader", f"--jobs={number}", "-o", "%t|%P|%r")
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
        hint = "" if self._last_line else "; interrupt the cell to cancel it"
        place = self._place(number, partition)
        waits = f"job {number} waits in partition {partition}: {place}{_because(reason)}"
        lines = (self._news(waits, hint), self._held(partition))
        return "\n".join(filter(None, lines)) or None

    def look_soon(self) -> None:
        """Have the next `queue_line` ask Slurm, because srun has just reported on the job."""
        self._next_look = 0.0
        self._pause_s = _LOOK_S

    def _news(self, line: str, more: str = "") -> str | None:
        """Return ``line + more``; None if the line is the same as the last one."""
        if line == self._last_line:
            return None
        self._last_line = line
        return line + more

    def seconds_left(self) -> float:
        """Return the seconds until Slurm ends the job; 0 if it does not say, or the job is gone."""
        rows = self._ask("squeue", "--noheader", f"--jobs={self._found()}", "-o", "%L")
        left = rows[0].strip() if rows else ""
        if left in ("UNLIMITED", "NOT_SET"):
            return float("inf")
        # Days-hours:minutes:seconds, of which only the seconds always stand there.
        match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", left)
        if match is None:
            return 0.0
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds

    def _found(self) -> str:
        """Return the number of the job; empty if Slurm does not know the job yet."""
        if self.number is None:
            # All states: the job may have begun or ended before the first look.
            numbers = sent_from(self.session, self._ask(*SESSIONS, "--states=all"))
            self.number = numbers[0] if numbers else None
        return self.number or ""

    def _place(self, number: str, partition: str) -> str:
        waiting = (f"--partition={partition}", "--states=PD", "--sort=-p,i", "-o", "%i")
        queue = self._ask("squeue", "--noheader", *waiting)
        if number not in queue:
            return "place unknown"
        return f"place {queue.index(number) + 1} of {len(queue)}"

    def _held(self, partition: str) -> str | None:
        """Return a line on who holds the cores; None if it is too early or the line is the same."""
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
        except (ValueError, IndexError):
            # A line that we cannot read is no reason to end the wait.
            return None
        away = f", {out} out of service" if out else ""
        line = f"{taken} of {total} cores are taken{away}{holders}."
        if line == self._last_held:
            return None
        self._last_held = line
        return line

    def verdict(
        self, said: Sequence[str], asked: str, a_rank_failed: bool, a_rank_spoke: bool = False
    ) -> LaunchError | None:
        """Return the reason for which Slurm itself ended the run; None if the command failed.

        Args:
            said: lines of srun and slurmstepd.
            asked: the request, as a learner would type it.
            a_rank_failed: whether a rank has failed. The caller then names that rank instead of a
                step that was cancelled.
            a_rank_spoke: whether a rank has printed something.
        """
        text = "\n".join(said)
        state = "" if self.step else self._state()
        # Words of srun are more exact than the state of the job.
        state = next((known for words, known in _SAID if re.search(words, text)), state)
        # When one task fails, srun cancels the others in the same words as an administrator's
        # scancel.
        blamed = a_rank_failed or _FAILED_TASK.search(text)
        cancelled = "CANCELLED AT" in text or "has been revoked" in text
        if state not in _STATES and cancelled and not blamed:
            state = "CANCELLED"
        if state in _STATES:
            return LaunchError(f"{self.called} {_STATES[state]}")
        if match := _REFUSED.search(text):
            return LaunchError(
                f"Slurm refused the request: {match[1]}. It was: {asked}. {_SETTINGS}"
            )

        # If all lines are srun's own and no task had its turn, srun has refused its options.
        own = [line for line in said if not is_news(line)]
        for line in own:
            if not line.startswith(("srun: ", 'Try "srun ')) or _OF_A_TASK.match(line):
                return None
        if not own or a_rank_spoke:
            return None
        lines = "\n".join(own)
        return LaunchError(f"srun refused to start: {asked}. {_SETTINGS} It said:\n{lines}")

    def _state(self) -> str:
        if not (number := self._found()):
            return ""
        limit = time.monotonic() + _COMPLETING_S
        while True:
            told = "\n".join(self._ask("scontrol", "show", "job", number))
            match = re.search(r"JobState=(\w+)", told)
            state = match[1] if match else ""
            # While nodes clean up after the job, Slurm does not say how it ended.
            if state != "COMPLETING" or time.monotonic() > limit:
                return state
            time.sleep(_FIRST_LOOK_S)

    def _ask(self, *argv: str) -> list[str]:
        """Return the lines of an answer; none if there is no answer.

        A controller that is away for a moment is no reason to give a job up.
        """
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
    """Return whether a line of srun only reports on the job's way through the queue."""
    return bool(_NEWS.match(line))


def _holders(jobs: Sequence[Sequence[str]], taken: int) -> str:
    """Return the end of a sentence that says which users hold the ``taken`` cores.

    Args:
        jobs: a (number, user's number, user's name, cores, nodes, name) for each running job.
        taken: cores in use, also those of jobs that are not among ``jobs``.
    """
    held: dict[str, list[Sequence[str]]] = {}
    for job in jobs:
        user = "yours" if job[1] == str(os.getuid()) else job[2]
        held.setdefault(user, []).append(job)
    cores = {user: sum(int(job[3]) for job in theirs) for user, theirs in held.items()}

    # Our own jobs come first: those we can end ourselves.
    order = sorted(held, key=lambda user: (user != "yours", -cores[user]))
    parts = []
    for user in order[:_MOST_HOLDERS]:
        nodes = sorted({job[4] for job in held[user]})
        where = ", ".join(nodes[:_MOST_HOLDERS])
        if len(nodes) > _MOST_HOLDERS:
            where += ", …"
        n = len(held[user])
        parts.append(f"{cores[user]} by {n} {'job' if n == 1 else 'jobs'} of {user} on {where}")
    if others := order[_MOST_HOLDERS:]:
        parts.append(f"{sum(cores[user] for user in others)} by {len(others)} more users")
    if (hidden := taken - sum(cores.values())) > 0:
        parts.append(
            f"{hidden} by jobs of other partitions, or that this cluster does not show you"
        )

    ending = f": {'; '.join(parts)}" if parts else ""
    ours = [job[0] for job in held.get("yours", ()) if job[5] == NAME]
    if ours:
        ending += (
            f". Restarting a notebook's kernel ends its job, as does `scancel {' '.join(ours)}`"
        )
    return ending


def _because(reason: str) -> str:
    meaning = _REASONS.get(reason.split(",")[0])
    return f" ({reason}: {meaning})" if meaning else f" ({reason})"
