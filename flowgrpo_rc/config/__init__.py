"""The configuration of a run: composed, translated from other words, checked."""
