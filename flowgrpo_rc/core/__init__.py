"""Pure maths on [B, T] tensors; it needs torch and the standard library, and nothing else."""
