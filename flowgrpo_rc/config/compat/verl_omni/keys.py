"""What the rules for verl-omni's keys share: names of its sections, and answers."""

from __future__ import annotations

from flowgrpo_rc.config.compat.rules import reported

PREFIX = "actor_rollout_ref."
MODEL = f"{PREFIX}model"
ACTOR = f"{PREFIX}actor"
ROLLOUT = f"{PREFIX}rollout"
# A whole command gives both: verl-omni has no default for the second.
WHOLE = (f"{MODEL}.path", f"{ROLLOUT}.name")

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
LAUNCHER = reported("the launcher decides: accelerate launch --num_processes N (--num_machines M)")
SHARDING = reported("how weights are sharded and offloaded does not change what is trained")
LOGGING = reported("logging: metrics.jsonl, samples/ and report.html are always written")
LOADING = reported("prompt files are read whole, by this project's readers")
ADAPTER = "adapters are found by the checkpoint's pipeline class"
