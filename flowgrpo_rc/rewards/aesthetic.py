"""A reward for the beauty of an image: a small network on CLIP's image features.

Shapes: N images, D features of CLIP.

Reference: the improved aesthetic predictor of LAION,
https://github.com/christophschuhmann/improved-aesthetic-predictor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.reading import blaming
from flowgrpo_rc.rewards.backbones.checkpoint import linear_layers
from flowgrpo_rc.rewards.backbones.clip import ClipReward
from flowgrpo_rc.rewards.base import Scores

ENDINGS = (".safetensors", ".pth")


@dataclass(kw_only=True, eq=False)
class Aesthetic(ClipReward):
    """The predictor's score, about 1 to 10. It ignores the prompt.

    DDPO and flow_grpo divide the score by 10; a weight of 0.1 gives their numbers. `head` is the
    file with the weights of the small network: the published .pth, of which only tensors are read,
    or .safetensors. `path` is the CLIP that it was trained on.
    """

    num_parameters = 427_616_513  # CLIP ViT-L/14

    head: str
    path: str = "openai/clip-vit-large-patch14"

    def __post_init__(self) -> None:
        self._file = Path(self.head).expanduser()
        if self._file.suffix not in ENDINGS or not self._file.is_file():
            raise ValueError(
                f"head={self.head!r}: give an existing file that ends in {' or '.join(ENDINGS)}"
            )
        super().__post_init__()

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        with torch.inference_mode():
            return Scores(values=self._head(self.image_features(samples)).squeeze(1).tolist())

    @cached_property
    def _head(self) -> nn.Sequential:
        with blaming(f"head={str(self._file)!r}"):
            if self._file.suffix == ".safetensors":
                stored = load_file(self._file)
            else:
                stored = torch.load(self._file, map_location="cpu", weights_only=True)
            return linear_head(stored)


def linear_head(state: Mapping[str, Tensor]) -> nn.Sequential:
    """Builds the linear layers `layers.N.weight` and `layers.N.bias` in a row, [N, D] -> [N, 1].

    The dropout between the published layers does nothing at inference, so it is left out.
    """
    layers = linear_layers({name.removeprefix("layers."): tensor for name, tensor in state.items()})
    if layers[-1].out_features != 1 or any(layer.bias is None for layer in layers):
        raise ValueError("the head must be linear layers with a bias, and end in one number")
    return nn.Sequential(*layers)
