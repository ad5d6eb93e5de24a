"""A reward for how well a video fits its prompt: the mean of the `clip` reward over its frames."""

from flowgrpo_rc.rewards.backbones.frames import FrameMean
from flowgrpo_rc.rewards.clip import ClipScore


class VideoClip(FrameMean):
    """The mean score of the frames by the `clip` reward, whose options it takes."""

    image_reward = ClipScore
