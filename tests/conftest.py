"""Beside a cluster, too, tests start their ranks here; those in tests/slurm say otherwise."""

import os

os.environ["COURSE_PP_WHERE"] = "local"
