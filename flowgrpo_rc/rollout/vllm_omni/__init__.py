"""vLLM-Omni in a process of its own.

The trainer's side is `channel` and `process`. The engine's side is `child`, `host`, `worker`,
`recorder` and `pipelines`; only the engine's process imports the last four.
"""
