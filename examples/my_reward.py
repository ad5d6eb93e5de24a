"""A reward of your own, as a class and as a plain function. Run from this folder:

flowgrpo-rc train reward.terms.ocr=null reward.terms.tint._target_=my_reward.Tint
reward.terms.tint.channel=blue flowgrpo-rc train reward.terms.ocr=null
reward.terms.red._target_=function reward.terms.red.path=my_reward:redness
"""

from collections.abc import Sequence

import numpy as np

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.rewards.base import Reward, Scores

CHANNELS = ("red", "green", "blue")


class Tint(Reward):
    """How much one channel stands out: its mean minus the mean of the other two, from -1 to 1.

    The keyword parameters are options in the configuration; a ValueError is shown with the key that
    it came from.
    """

    kind = "image"
    part_names = ("brightness",)  # logged as reward/tint/brightness, not optimised

    def __init__(self, *, channel: str = "red") -> None:
        if channel not in CHANNELS:
            raise ValueError(f"channel={channel!r}: allowed are {', '.join(CHANNELS)}")
        self.channel = CHANNELS.index(channel)

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        means = samples.mean(axis=(1, 2)) / 255  # [N, H, W, 3] uint8 -> [N, 3]
        others = np.delete(means, self.channel, axis=1).mean(axis=1)
        return Scores(
            values=(means[:, self.channel] - others).tolist(),
            parts={"brightness": means.mean(axis=1).tolist()},
        )


def redness(image: np.ndarray, prompt: Prompt) -> float:
    """One image [H, W, 3] uint8 with its prompt; a number that is not finite means that it could
    not be scored.
    """
    red, green, blue = image.mean(axis=(0, 1)) / 255
    return float(red - (green + blue) / 2)
