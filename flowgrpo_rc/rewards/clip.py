"""A reward for how well an image fits its prompt, by the cosine of CLIP.

Reference: CLIPScore, https://arxiv.org/abs/2104.08718.
"""

from dataclasses import dataclass

from flowgrpo_rc.rewards.backbones.clip import ClipReward


@dataclass(kw_only=True, eq=False)
class ClipScore(ClipReward):
    """The cosine of image and prompt, from -1 to 1.

    CLIPScore is 2.5 times the positive part of the cosine; a weight of 2.5 gives its numbers. Here
    the score may be negative; it still ranks images that fit badly.
    """

    num_parameters = 427_616_513  # CLIP ViT-L/14

    path: str = "openai/clip-vit-large-patch14"
