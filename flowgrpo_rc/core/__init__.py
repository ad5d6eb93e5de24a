"""Pure [B, T] tensor maths: torch and the standard library, nothing else."""
