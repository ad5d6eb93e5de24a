"""The pipelines of vLLM-Omni with the trainer's denoising loop, one family to a file.

Only the engine's process imports these modules, and of them only the one of its checkpoint.
"""
