"""Policy gradients on log-probs: PPO's clip and its relatives, with rollout correction."""
