"""The keys of verl-omni's `diffusion_trainer` configuration, and what each is here.

https://github.com/verl-project/verl-omni, 2026. Keys that are the same but for
`actor_rollout_ref.` need no rule. A rule for a section holds for all keys below it that have none.
"""

from __future__ import annotations

from flowgrpo_rc.config.compat.verl_omni.actor import ACTOR_RULES
from flowgrpo_rc.config.compat.verl_omni.data import DATA_RULES
from flowgrpo_rc.config.compat.verl_omni.keys import MODEL, PREFIX, ROLLOUT, WHOLE
from flowgrpo_rc.config.compat.verl_omni.loss import LOSS_RULES
from flowgrpo_rc.config.compat.verl_omni.model import MODEL_RULES
from flowgrpo_rc.config.compat.verl_omni.reward import REWARD_RULES, REWARDS
from flowgrpo_rc.config.compat.verl_omni.rollout import ROLLOUT_RULES
from flowgrpo_rc.config.compat.verl_omni.trainer import ALGORITHM_RULES, TRAINER_RULES

__all__ = ["PREFIX", "REWARDS", "RULES", "UNSAID", "WHOLE"]

# Defaults of verl-omni that configs/verl_omni.yaml cannot hold.
UNSAID = {
    f"{MODEL}.lora_rank": 0,
    f"{MODEL}.target_modules": "all-linear",
    f"{ROLLOUT}.n": 1,
    "trainer.total_epochs": 30,
}
RULES = (
    MODEL_RULES
    | ACTOR_RULES
    | LOSS_RULES
    | ROLLOUT_RULES
    | DATA_RULES
    | REWARD_RULES
    | ALGORITHM_RULES
    | TRAINER_RULES
)
