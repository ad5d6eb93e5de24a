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
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.reading import blaming, read_mapping
from flowgrpo_rc.rewards.backbones.checkpoint import converted_folder, load_pretrained
from flowgrpo_rc.rewards.backbones.qwen_vl import QwenVlReader, check_qwen_vl, plain
from flowgrpo_rc.rewards.base import Reward, Scores

WEIGHTS = "model.safetensors"
ASKED = "reward.json"
FILES = ("config.json", WEIGHTS, "tokenizer_config.json", "preprocessor_config.json", ASKED)
PLACE = "{text_prompt}"  # where the prompt stands in an instruction
_HEAD = re.compile(r"rm_head(?:s\.head_(\d+))?\.(\d+)\.(weight|bias)")


class Asked(NamedTuple):
    """Holds what `reward.json` says of a checkpoint."""

    instructions: Sequence[str]  # one for each head, with `PLACE` in it and the token
    token: str  # whose hidden state is read
    num_pixels: int  # to which pictures are scaled


class _LoadedReward(NamedTuple):
    model: Any
    reader: QwenVlReader
    heads: Sequence[nn.Sequential]
    token_id: int


class VlmReward(Reward):
    """Scores by a Qwen2-VL or Qwen2.5-VL with such heads: the mean over them. Loads at first use.

    Args:
      path: the folder that `examples/convert_reward.py` makes from the published checkpoint.
      device: auto (the GPU of this process, or the CPU), cpu, cuda, cuda:1.
      dtype: fp32, bf16 or fp16; of the model, while the heads are fp32.
      batch_size: samples in one forward.
    """

    converter: ClassVar[str]  # the first argument of that script

    def __init__(
        self, *, path: str, device: str = "auto", dtype: str = "bf16", batch_size: int = 8
    ) -> None:
        self._folder = converted_folder(path, FILES, self.converter)
        check_qwen_vl(str(self._folder), device=device, dtype=dtype, batch_size=batch_size)
        with blaming(f"path={path!r}: {ASKED}"):
            self._asked = _asked(read_mapping(self._folder / ASKED))
        self._device = device
        self._dtype = dtype
        self._batch_size = batch_size

    @abstractmethod
    def pictures(self, sample: np.ndarray, prompt: Prompt) -> list[np.ndarray]:
        """Returns what the model sees of a sample, uint8 RGB, [H, W, 3] each."""

    def __call__(self, samples: np.ndarray, prompts: Sequence[Prompt]) -> Scores:
        shown = [self.pictures(*pair) for pair in zip(samples, prompts, strict=True)]
        means = self.means(shown, [prompt.text for prompt in prompts])
        return Scores(values=means.mean(1).tolist())

    def means(self, pictures: Sequence[Sequence[np.ndarray]], texts: Sequence[str]) -> Tensor:
        """Computes the mean that each head gives for each sample, fp32 on the CPU, [N, I]."""
        rows = []
        for start in range(0, len(texts), self._batch_size):
            stop = start + self._batch_size
            columns = [
                self._mean(pictures[start:stop], texts[start:stop], instruction, head)
                for instruction, head in zip(
                    self._asked.instructions, self._loaded.heads, strict=True
                )
            ]
            rows.append(torch.stack(columns, dim=1))
        return torch.cat(rows)

    @torch.inference_mode()
    def _mean(
        self,
        pictures: Sequence[Sequence[np.ndarray]],
        texts: Sequence[str],
        instruction: str,
        head: nn.Sequential,
    ) -> Tensor:
        model, reader, _, token_id = self._loaded
        conversations = []
        for shown, text in zip(pictures, texts, strict=True):
            content: list[dict[str, str]] = [{"type": "image"} for _ in shown]
            content.append({"type": "text", "text": instruction.replace(PLACE, plain(text))})
            conversations.append([{"role": "user", "content": content}])
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
        return head(read.float())[:, 0].cpu()

    @cached_property
    def _loaded(self) -> _LoadedReward:
        from transformers import AutoModel

        path = str(self._folder)
        model = load_pretrained(AutoModel, path, device=self._device, dtype=self._dtype)
        reader = QwenVlReader(
            path,
            image_token_id=model.config.image_token_id,
            padding_side="right",
            num_pixels=self._asked.num_pixels,
        )
        token_id = reader.tokenizer.convert_tokens_to_ids(self._asked.token)
        if token_id in (None, reader.tokenizer.unk_token_id):
            raise ValueError(f"path={path!r}: the tokenizer has no token {self._asked.token}")
        heads = _heads(self._folder / WEIGHTS)
        if len(heads) != len(self._asked.instructions):
            raise ValueError(
                f"path={path!r} has {len(heads)} heads (rm_head) in {WEIGHTS}, but "
                f"{len(self._asked.instructions)} instructions in {ASKED}"
            )
        return _LoadedReward(model, reader, [head.to(model.device) for head in heads], token_id)


def _asked(found: Mapping[str, Any]) -> Asked:
    match found:
        case {
            "instructions": [str(), *_] as instructions,
            "token": str(token),
            "num_pixels": int(num_pixels),
        } if all(isinstance(text, str) for text in instructions) and num_pixels > 0:
            for text in instructions:
                if text.count(PLACE) != 1 or text.count(token) != 1:
                    raise ValueError(f"each instruction needs {PLACE} and {token} once")
            return Asked(instructions, token, num_pixels)
    raise ValueError("it needs instructions (texts), token (a text) and num_pixels (above 0)")


def _heads(file: Path) -> list[nn.Sequential]:
    """Reads the heads of a checkpoint: linear layers with ReLU between them, in fp32."""
    layers: dict[tuple[int, int], dict[str, Tensor]] = {}
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - safe_open is no mapping
            if found := _HEAD.fullmatch(name):
                head, layer, kind = int(found[1] or 0), int(found[2]), found[3]
                layers.setdefault((head, layer), {})[kind] = weights.get_tensor(name).float()
    heads: dict[int, nn.Sequential] = {}
    for (head, _), tensors in sorted(layers.items()):
        rows, columns = tensors["weight"].shape
        linear = nn.Linear(columns, rows, bias="bias" in tensors)
        linear.load_state_dict(tensors)
        stack = heads.setdefault(head, nn.Sequential())
        if len(stack):
            stack.append(nn.ReLU())
        stack.append(linear)
    return [stack.requires_grad_(False).eval() for _, stack in sorted(heads.items())]
