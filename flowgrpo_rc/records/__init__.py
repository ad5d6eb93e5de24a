"""The files that a run leaves (metrics, samples, checkpoints, rollouts) and its console output."""
