"""Asks a model beside its training: held-out prompts, and suites of other questions."""
