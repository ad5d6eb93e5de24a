"""Prompt files and the order in which training walks through them."""
