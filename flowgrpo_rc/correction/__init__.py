"""Rollout correction: importance weights, rejection, diagnostics. Only [B, T] tensors cross its
entry.
"""
