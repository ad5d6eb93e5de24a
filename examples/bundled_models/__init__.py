"""What made the checkpoints and prompts of `flowgrpo_rc/assets`, each from nothing but a seed."""
