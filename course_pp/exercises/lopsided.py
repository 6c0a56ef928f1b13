"""Being moved to `bench`."""

from course_pp.exercises.bench import LopsidedLoss as LopsidedLoss
