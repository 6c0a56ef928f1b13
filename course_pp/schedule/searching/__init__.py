"""Two searches for the best order of a pipeline's actions: by improving orders, and exactly."""
