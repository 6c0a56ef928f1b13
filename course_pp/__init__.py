"""A course on pipeline parallelism in PyTorch, and the package it is taught from.

Importing this package imports nothing else: pick the part you need, for example
``from course_pp import schedule`` (pure Python) or ``from course_pp import parallel`` (torch).
"""

__version__ = "0.1.0"
