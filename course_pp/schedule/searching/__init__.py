"""Looking for the best order of a pipeline's actions: by rules, by local improvement, and exactly."""
