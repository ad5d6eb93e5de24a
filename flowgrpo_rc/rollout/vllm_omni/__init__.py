"""vLLM-Omni in a process of its own: the trainer's side of it (channel, process, lora) and the
child's (the rest).
"""
