"""What surrounds the model while it learns; `course_pp.training.data` turns text into batches."""
