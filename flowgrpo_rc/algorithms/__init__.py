"""Algorithms: each turns samples with rewards into gradients, behind `algorithm.Algorithm`."""
