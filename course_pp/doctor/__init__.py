"""What will fail on this machine, before a room finds out: ``python -m course_pp doctor``.

Each check is a function that returns a :class:`Finding`; :func:`examine` runs them all. Importing this imports no
torch, and nothing here needs it, Slurm, a home folder or /proc.
"""

from course_pp.doctor import machine, packages, running, slurm_limits
from course_pp.doctor.finding import Finding, run_checks

__all__ = ["Finding", "examine"]


def examine() -> list[Finding]:
    """Run every check and return the findings in a fixed order, after at most 18 seconds."""
    return run_checks([*machine.CHECKS, *packages.CHECKS, *slurm_limits.CHECKS, *running.CHECKS])
