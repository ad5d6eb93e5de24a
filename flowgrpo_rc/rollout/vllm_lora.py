"""The trainer's LoRA in the form that vLLM takes: a folder in peft's layout, named by a request."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor

from flowgrpo_rc.models.lora_files import peft_files
from flowgrpo_rc.rollout.engine import EngineError

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the only ones that vLLM makes room for


class VllmAdapter:
    """The one adapter that a vLLM engine holds.

    Args:
      engine: vLLM's LLMEngine.
      base: path of the checkpoint.
      config: its configuration, from the network's `peft_config`.

    Attributes:
      request: goes with all that is sampled; None for the base model.
    """

    def __init__(self, engine: Any, base: str, config: Any) -> None:
        from vllm.lora.request import LoRARequest

        self.request: Any = None
        self._make_request = LoRARequest
        self._engine = engine
        self._base = base
        self._config = config
        self._count = 0

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Makes LoRA tensors, all or some, the adapter, in place of the former one.

        Each time it is a new adapter to vLLM, which caches weights by number and prefixes by name.
        """
        self.drop()
        self._count += 1
        # vLLM may read the folder again as long as the adapter is in use, so it stays until then.
        folder = Path(mkdtemp(prefix="flowgrpo_rc_lora_"))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder)
        targets = sorted({module_of(key) for key in state})
        files = peft_files(
            state,
            rank=self._config.r,
            alpha=self._config.lora_alpha,
            target_modules=targets,
            base=self._base,
        )
        for name, content in files.items():
            (folder / name).write_bytes(content)
        self.request = self._make_request(
            lora_name=f"policy_{self._count}", lora_int_id=self._count, lora_path=str(folder)
        )
        added = self._engine.add_lora(self.request)
        if not added or list(self._engine.list_loras()) != [self._count]:
            raise EngineError(f"vLLM did not take over LoRA adapter {self._count}")

    def drop(self) -> None:
        """Removes the adapter, if there is one, and its folder."""
        if self.request is not None:
            self._engine.remove_lora(self.request.lora_int_id)
            self._remove_folder()
            self.request = None


def module_of(key: str) -> str:
    """Returns the module that a LoRA tensor belongs to.

    `model.layers.0.self_attn.q_proj.lora_A.default.weight` gives `model.layers.0.self_attn.q_proj`.
    """
    return key.split(".lora_")[0]


def max_lora_rank(rank: int) -> int:
    """Returns the smallest rank that vLLM makes room for and that holds `rank`."""
    fitting = [allowed for allowed in MAX_LORA_RANKS if allowed >= rank]
    if not fitting:
        raise ValueError(f"model.lora_rank={rank}: vLLM takes at most {MAX_LORA_RANKS[-1]}")
    return fitting[0]
