"""Calibration: measures how engine and trainer differ before any update.

It names a likely fault and chooses settings that fit.
"""
