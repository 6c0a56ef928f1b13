"""What people learned: thirty questions before and after the course, and what an instructor sees of a class."""
