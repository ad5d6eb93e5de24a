"""Assembles a run: the spec of a run becomes its objects, each made once."""
