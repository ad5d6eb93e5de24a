"""Rollout engines: one file is one engine, found by the file's name."""
