"""What the numbers of another trainer's trajectories show about a run that collapses."""
