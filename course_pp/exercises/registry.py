"""Being moved to `exercise`."""

from course_pp.exercises.exercise import MODULES as MODULES
from course_pp.exercises.exercise import exercises as exercises
from course_pp.exercises.exercise import exercises_of as exercises_of
from course_pp.exercises.exercise import find as find
from course_pp.exercises.exercise import named as named
from course_pp.exercises.exercise import number_of as number_of
