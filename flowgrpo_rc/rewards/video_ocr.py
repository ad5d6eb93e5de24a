"""A reward for how well an OCR model reads the target text in a video: the mean over its frames."""

from flowgrpo_rc.rewards.backbones.frames import FrameMean
from flowgrpo_rc.rewards.ocr import OCR


class VideoOCR(FrameMean):
    """The mean score of the frames by the `ocr` reward, whose options it takes.

    Flow-GRPO's video reward leaves out frames that score 0. Here they count, so the text has to
    stay.
    """

    image_reward = OCR
    part_names = OCR.part_names
    requires_target = True
