"""The dataclasses that cross the seams between data, rollout, rewards, correction and update.

Shape legend: B samples of this process (prompts x samples per prompt), P prompts, T SDE steps of the window,
S denoising steps of the schedule, L text tokens, E embedding width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One line of a prompt file. `index` is its position there; `target` is the text that OCR should read."""

    text: str
    index: int
    target: str | None = None
    negative_text: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """The prompts of one training step that this process samples, with what makes each of them unique.

    `slots` are positions in the global batch of the step. They, not the process or the position here, seed the
    noise, so the draws do not depend on how many processes share the batch.
    """

    step: int
    prompts: Sequence[Prompt]
    slots: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.slots):
            raise ValueError(f"PromptBatch: {len(self.prompts)} prompts but {len(self.slots)} slots")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditioning:
    """Text conditioning of P prompts: embeds [P, L, E], pooled [P, E'] or None, mask [P, L] or None."""

    embeds: Tensor
    pooled: Tensor | None = None
    mask: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Conditioning:
        return Conditioning(
            embeds=self.embeds[rows],
            pooled=None if self.pooled is None else self.pooled[rows],
            mask=None if self.mask is None else self.mask[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSpec:
    """What a rollout was asked to do. An engine echoes the one it used; the trainer refuses any difference."""

    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    noise_level: float
    sde_type: str
    log_prob_convention: str
    max_sequence_length: int
    dtype: str

    def differences(self, other: SamplerSpec) -> list[str]:
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name}: {mine!r} here, {theirs!r} there" for name, mine, theirs in pairs if mine != theirs]


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionBatch:
    """Trajectories of B samples inside their SDE window; fp32 unless said otherwise.

    all_latents        [B, T+1, ...]  states x_t of the window; entry t+1 is the stored result of step t
    all_timesteps      [B, T]         what the transformer receives (sigma x 1000)
    step_indices       [B, T] int64   position of each step in the schedule
    sigmas             [S+1]          the schedule, so that both sides use the same bits by index
    rollout_log_probs  [B, T]         mean over latent dimensions; None if the engine did not record them
    prev_sample_mean   [B, T, ...]    mean of the reverse step at rollout; None unless something needs it
    old_log_probs      [B, T]         None until bypass mode or the recompute fills it
    rollout_is_weights [B, T]         None where no weights apply; no gradient
    rejection_mask     [B, T] bool    True where the step is kept; None means that all are kept
    advantages         [B, T]         None until the rewards are known
    conditioning       of the P prompts; `prompt_index` [B] says which row belongs to a sample
    negative           of the P negative prompts, or None without guidance
    group, seed, policy_version [B] int64; `group` is the prompt's slot in the global batch
    """

    spec: SamplerSpec
    all_latents: Tensor
    all_timesteps: Tensor
    step_indices: Tensor
    sigmas: Tensor
    conditioning: Conditioning
    prompt_index: Tensor
    group: Tensor
    seed: Tensor
    policy_version: Tensor
    negative: Conditioning | None = None
    rollout_log_probs: Tensor | None = None
    prev_sample_mean: Tensor | None = None
    old_log_probs: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    rejection_mask: Tensor | None = None
    advantages: Tensor | None = None

    def __len__(self) -> int:
        return self.all_latents.shape[0]

    @property
    def num_steps(self) -> int:
        """T, the number of SDE steps that were recorded."""
        return self.step_indices.shape[1]

    def replace(self, **changes: Any) -> DiffusionBatch:
        return replace(self, **changes)

    def rows(self, start: int, stop: int) -> DiffusionBatch:
        """Samples start..stop. Conditioning stays that of all prompts; `prompt_index` still points into it."""
        return replace(self, **{name: value[start:stop] for name, value in self.per_sample().items()})

    def step(self, t: int) -> DiffusionBatch:
        """SDE step t alone, as a batch with T = 1."""
        steps = {name: value[:, t : t + 1] for name, value in self._present(_STEP_FIELDS).items()}
        return replace(self, all_latents=self.all_latents[:, t : t + 2], **steps)

    def per_sample(self) -> dict[str, Any]:
        """The fields with one row per sample, by name, without those that are None."""
        return self._present(("all_latents", *_STEP_FIELDS, "prompt_index", "group", "seed", "policy_version"))

    def _present(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


_STEP_FIELDS = (
    "all_timesteps",
    "step_indices",
    "rollout_log_probs",
    "prev_sample_mean",
    "old_log_probs",
    "rollout_is_weights",
    "rejection_mask",
    "advantages",
)


def concat(batches: Sequence[DiffusionBatch]) -> DiffusionBatch:
    """The rows of several batches of one rollout, in order. They must share their conditioning and schedule."""
    first = batches[0]
    if any(batch.conditioning is not first.conditioning or batch.spec != first.spec for batch in batches):
        raise ValueError("only batches of one rollout, with one conditioning and one spec, can be joined")
    columns = [batch.per_sample() for batch in batches]
    return first.replace(**{name: torch.cat([column[name] for column in columns]) for name in columns[0]})


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Rewards of B samples.

    total [B] float64: weighted sum, undefined where not valid; valid [B] bool: False where any reward failed;
    parts: name -> [B] float64, each reward and what it logs apart (NaN where it failed).
    """

    total: Tensor
    valid: Tensor
    parts: Mapping[str, Tensor]
