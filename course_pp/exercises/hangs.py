"""Being moved to `mistakes`."""

from course_pp.exercises.mistakes import explained as explained
from course_pp.exercises.mistakes import explained_in_line as explained_in_line
