"""The rewards: one file is one reward, found by the file's name."""
