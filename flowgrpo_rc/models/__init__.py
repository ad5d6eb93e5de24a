"""Models: one family to a file, each an adapter of its stock pipeline; and LoRA on all of them."""
