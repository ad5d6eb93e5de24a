"""A reward for which image people would pick: a CLIP trained on their choices.

Reference: PickScore, https://arxiv.org/abs/2305.01569.
"""

from dataclasses import dataclass

from flowgrpo_rc.rewards.backbones.clip import ClipReward


@dataclass(kw_only=True, eq=False)
class PickScore(ClipReward):
    """The cosine of image and prompt times the model's scale, about 15 to 26.

    flow_grpo divides it by 26; a weight of 0.03846 gives its numbers. The published checkpoint
    takes image processor and tokenizer from the CLIP that it was trained from.
    """

    num_parameters = 986_109_441  # CLIP ViT-H/14
    is_scaled = True

    path: str = "yuvalkirstain/PickScore_v1"
    processor: str | None = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
