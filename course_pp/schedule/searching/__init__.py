"""Looking for the best order of a pipeline's actions: heuristics, local improvement, and exactly."""
