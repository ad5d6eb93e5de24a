"""A reward of your own, as a class and as a plain function.

Run from this folder, with overrides that name the class or the function:

    flowgrpo-rc train reward.terms.ocr=null \
        reward.terms.tint._target_=my_reward.Tint reward.terms.tint.channel=blue
    flowgrpo-rc train reward.terms.ocr=null \
        reward.terms.red._target_=function reward.terms.red.path=my_reward:redness

Legend: N images of a call, H and W their height and width in pixels.
"""

from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores

CHANNELS = ("red", "green", "blue")


class Tint(Reward):
    """A reward for pictures in one colour: the mean of its channel less that of the other two.

    It is between -1 and 1. Keyword parameters of the constructor are options in the configuration.
    A ValueError is shown with the key that the option came from.

    Attributes:
      kind: what it scores.
      part_names: values that are logged as reward/tint/NAME and not optimised.
      channel: index of the colour.
    """

    kind = "image"
    part_names = ("brightness",)

    def __init__(self, *, channel: str = "red") -> None:
        if channel not in CHANNELS:
            raise ValueError(f"channel={channel!r}: allowed are {', '.join(CHANNELS)}")
        self.channel = CHANNELS.index(channel)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        # samples is uint8, [N, H, W, 3]; the means are [N, 3].
        means = samples.mean(axis=(1, 2)) / 255
        others = np.delete(means, self.channel, axis=1).mean(axis=1)
        return Scores(
            values=(means[:, self.channel] - others).tolist(),
            parts={"brightness": means.mean(axis=1).tolist()},
        )


def redness(image: np.ndarray, prompt: Prompt) -> float:
    """Scores one image.

    Args:
      image: uint8, [H, W, 3].
      prompt: the prompt that it was made from.

    Returns:
      The reward. A number that is not finite means that the image could not be scored.
    """
    red, green, blue = image.mean(axis=(0, 1)) / 255
    return float(red - (green + blue) / 2)
