"""The trainer's LoRA as vLLM takes it: a folder in the layout of peft, named by a request."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import Tensor

from flowgrpo_rc.models.peft_files import peft_files

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the only ones that vLLM makes room for


class VllmAdapter:
    """The one adapter that a vLLM engine holds. `request` goes with everything that is sampled;
    None: the base model.

    engine: vLLM's LLMEngine; base: the checkpoint; name and config: the LoRA's in the trainer's
    network, as in its `peft_config`.
    """

    def __init__(self, engine: Any, base: str, name: str, config: Any) -> None:
        from vllm.lora.request import LoRARequest

        self.request: Any = None
        self._make_request = LoRARequest
        self._engine = engine
        self._base = base
        self._name = name
        self._config = config
        self._count = 0

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Make these LoRA tensors, named as in the network, all or some of them, the adapter; the
        former one goes.

        Each is a new adapter to vLLM, which keeps the weights by the number and cached prefixes by
        the name.
        """
        self.drop()
        self._count += 1
        # As long as the adapter is in use, vLLM may read it again.
        folder = Path(mkdtemp(prefix="flowgrpo_rc_lora_"))
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder)
        targets = sorted({module_of(key) for key in state})
        files = peft_files(
            state,
            adapter=self._name,
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
        if not self._engine.add_lora(self.request) or list(self._engine.list_loras()) != [
            self._count
        ]:
            raise RuntimeError(f"vLLM did not take over LoRA adapter {self._count}")

    def drop(self) -> None:
        if self.request is not None:
            self._engine.remove_lora(self.request.lora_int_id)
            self._remove_folder()
            self.request = None


def module_of(key: str) -> str:
    """`model.layers.0.self_attn.q_proj` of
    `model.layers.0.self_attn.q_proj.lora_A.default.weight`.
    """
    return key.split(".lora_")[0]


def max_lora_rank(rank: int) -> int:
    """The smallest rank that vLLM makes room for and that holds `rank`. ValueError where there is
    none.
    """
    fitting = [allowed for allowed in MAX_LORA_RANKS if allowed >= rank]
    if not fitting:
        raise ValueError(f"model.lora_rank={rank}: vLLM takes at most {MAX_LORA_RANKS[-1]}")
    return fitting[0]
