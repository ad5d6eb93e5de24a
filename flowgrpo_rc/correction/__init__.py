"""Rollout correction: importance weights, rejection and diagnostics of log-probs [B, T].

`api` holds the public functions, `correct` the correction itself.
"""
