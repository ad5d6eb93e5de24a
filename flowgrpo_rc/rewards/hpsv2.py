"""A human preference score: a CLIP trained on people's rankings of generated images.

Reference: HPSv2, https://arxiv.org/abs/2306.09341.
"""

from flowgrpo_rc.rewards.backbones.clip import ClipReward


class HPSv2(ClipReward):
    """The cosine of image and prompt in HPSv2's model, about 0.2 to 0.35.

    `path` is the folder that `examples/convert_reward.py hpsv2` makes from the published
    checkpoint, which has the format of open_clip.
    """

    num_parameters = 986_109_441  # CLIP ViT-H/14
