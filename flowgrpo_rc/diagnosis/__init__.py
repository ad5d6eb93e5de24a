"""Finds why a run of another trainer collapses, from the numbers of its trajectories."""
