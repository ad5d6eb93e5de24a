"""Measures how engine and trainer differ before any update, names a likely fault, and chooses
settings that fit.
"""
