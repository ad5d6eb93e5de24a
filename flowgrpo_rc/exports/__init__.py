"""LoRA files for other programs, their model card, and the upload to the Hugging Face Hub."""
