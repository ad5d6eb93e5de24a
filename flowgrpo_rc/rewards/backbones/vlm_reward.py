"""A vision-language model whose head gives a number in place of words.

Its prompt ends with a token of its own. The last hidden state at this token goes through the head,
which gives the mean and the log-deviation of a normal distribution; the mean is the score.

Shapes: N samples, I instructions, L tokens.

Reference: HPSv3, https://arxiv.org/abs/2508.03789; EditReward, https://arxiv.org/abs/2509.26346.
Facts about prompt, head and positions are those of MizzenAI/HPSv3 and TIGER-AI-Lab/EditReward.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.reading import blaming, read_mapping
from flowgrpo_rc.rewards.backbones.checkpoint import LoadsModel, converted_folder, linear_layers
from flowgrpo_rc.rewards.backbones.qwen_vl import QwenVlReader, check_qwen_vl, message, plain
from flowgrpo_rc.rewards.base import Reward, Scores, batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"
ASKED = "reward.json"
FILES = ("config.json", WEIGHTS, "tokenizer_config.json", "preprocessor_config.json", ASKED)
PLACE = "{text_prompt}"  # where the prompt stands in an instruction
_HEAD = re.compile(r"rm_head(?:s\.head_(\d+))?\.(\d+\.(?:weight|bias))")


class Asked(NamedTuple):
    """Holds what `reward.json` says of a checkpoint."""

    instructions: Sequence[str]  # one for each head, with `PLACE` in it and the token
    token: str  # whose hidden state is read
    num_pixels: int  # to which pictures are scaled


@dataclass(kw_only=True, eq=False)
class VlmReward(LoadsModel, Reward):
    """Scores by a Qwen2-VL or Qwen2.5-VL with such heads: the mean over them. Loads at first use.

    `path` is the folder that `examples/convert_reward.py CONVERTER` makes from the published
    checkpoint.
    """

    converter: ClassVar[str]

    dtype: str = "bf16"  # of the model, while the heads are fp32
    batch_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._folder = converted_folder(self.path, FILES, self.converter)
        check_qwen_vl(self._folder)
        with blaming(f"path={self.path!r}: {ASKED}"):
            self._asked = _asked(read_mapping(self._folder / ASKED))

    @abstractmethod
    def pictures(self, sample: np.ndarray, prompt: Prompt) -> list[np.ndarray]:
        """Returns what the model sees of a sample, uint8 RGB, [H, W, 3] each."""

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        shown = [self.pictures(*pair) for pair in zip(samples, prompts, strict=True)]
        means = self.means(shown, [prompt.text for prompt in prompts])
        return Scores(values=means.mean(1).tolist())

    def means(self, pictures: Sequence[Sequence[np.ndarray]], texts: Sequence[str]) -> Tensor:
        """Computes the mean that each head gives for each sample, fp32 on the CPU, [N, I]."""
        means = []
        for rows in batches(len(texts), self.batch_size):
            columns = [
                self._mean(pictures[rows], texts[rows], head)
                for head in range(len(self._asked.instructions))
            ]
            means.append(torch.stack(columns, dim=1))
        return torch.cat(means)

    @torch.inference_mode()
    def _mean(
        self, pictures: Sequence[Sequence[np.ndarray]], texts: Sequence[str], head: int
    ) -> Tensor:
        model, reader, heads, token_id = self._loaded
        instruction = self._asked.instructions[head]
        questions = [instruction.replace(PLACE, plain(text)) for text in texts]
        conversations = [
            [message("user", text, pictures=len(shown))]
            for shown, text in zip(pictures, questions, strict=True)
        ]
        inputs = reader(conversations, [picture for shown in pictures for picture in shown])
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        tokens = inputs["input_ids"]
        # Trained with the plain positions of a text, also where the tokens are those of a picture.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape)
        hidden = model(
            input_ids=tokens,
            attention_mask=inputs["attention_mask"],
            position_ids=positions,
            pixel_values=inputs["pixel_values"].to(model.dtype),
            image_grid_thw=inputs["image_grid_thw"],
            use_cache=False,
        ).last_hidden_state
        read = hidden[tokens == token_id]
        if len(read) != len(texts):
            raise ValueError(f"{len(read)} tokens {self._asked.token} in {len(texts)} prompts")
        return heads[head](read.float())[:, 0].cpu()

    @cached_property
    def _loaded(self) -> tuple[PreTrainedModel, QwenVlReader, Sequence[nn.Sequential], int]:
        """Loads the model, what prepares its inputs, the heads, and the id of the token."""
        from transformers import AutoModel

        path = str(self._folder)
        # The heads are read below; the one that writes words is not needed.
        model = self.load(AutoModel, path, spare=r"^rm_head|^lm_head\.weight$")
        reader = QwenVlReader(
            path,
            image_token_id=model.config.image_token_id,
            padding_side="right",
            num_pixels=self._asked.num_pixels,
        )
        token_id = reader.tokenizer.convert_tokens_to_ids(self._asked.token)
        if token_id in (None, reader.tokenizer.unk_token_id):
            raise ValueError(f"path={path!r}: the tokenizer has no token {self._asked.token}")
        with blaming(f"path={path!r}: {WEIGHTS}"):
            heads = [head.to(model.device) for head in _heads(self._folder / WEIGHTS)]
        num_instructions = len(self._asked.instructions)
        if len(heads) != num_instructions:
            raise ValueError(
                f"path={path!r} has {len(heads)} heads (rm_head) but {num_instructions} "
                "instructions"
            )
        return model, reader, heads, token_id


def _asked(fields: Mapping[str, Any]) -> Asked:
    settings = Asked(**fields)
    for text in settings.instructions:
        places = (text.count(PLACE), text.count(settings.token))
        if places != (1, 1) or settings.num_pixels < 1:
            raise ValueError(
                f"each of the instructions needs {PLACE} and {settings.token} once, and num_pixels "
                "must be above 0"
            )
    return settings


def _heads(file: Path) -> list[nn.Sequential]:
    """Reads the heads of a checkpoint: linear layers with ReLU between them, in fp32."""
    heads: dict[int, dict[str, Tensor]] = {}
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - safe_open is no mapping
            match = _HEAD.fullmatch(name)
            if match is None and name.startswith("rm_head"):
                raise ValueError(f"{name} is no weight or bias of a head's linear layer")
            if match:
                heads.setdefault(int(match[1] or 0), {})[match[2]] = weights.get_tensor(name)
    stacks = []
    for _, tensors in sorted(heads.items()):
        first, *rest = linear_layers(tensors)
        stacks.append(nn.Sequential(first))
        for layer in rest:
            stacks[-1].extend([nn.ReLU(), layer])
    return stacks
