"""The dataclasses that cross the seams between data, rollout, rewards, correction and update.

Shape legend: B samples of this process (prompts x samples per prompt), P prompts, T steps (SDE
steps of the window, or tokens of the longest response), S denoising steps of the schedule, L text
tokens, E embedding width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One line of a prompt file. `index` is its position there; `target` is the text that OCR
    should read.
    """

    text: str
    index: int
    target: str | None = None
    negative_text: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """The prompts of one training step that this process samples, with what makes each of them
    unique.

    `slots` are positions in the global batch of the step. They, not the process or the position
    here, seed the noise, so the draws do not depend on how many processes share the batch.
    """

    step: int
    prompts: Sequence[Prompt]
    slots: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.slots):
            raise ValueError(
                f"PromptBatch: {len(self.prompts)} prompts but {len(self.slots)} slots"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditioning:
    """Text conditioning of P prompts: embeds [P, L, E], pooled [P, E'] or None, mask [P, L] bool or
    None.

    The mask is False at padding; None means that every token counts.
    """

    embeds: Tensor
    pooled: Tensor | None = None
    mask: Tensor | None = None

    def __getitem__(self, rows: Tensor) -> Conditioning:
        return Conditioning(
            embeds=self.embeds[rows],
            pooled=None if self.pooled is None else self.pooled[rows],
            mask=None if self.mask is None else self.mask[rows],
        )

    def __len__(self) -> int:
        """P."""
        return len(self.embeds)

    @classmethod
    def join(cls, parts: Sequence[Conditioning]) -> Conditioning:
        """The prompts of all parts, in order. Shorter ones are padded on the right and masked
        there.
        """
        length = max(part.embeds.shape[1] for part in parts)
        pooled = [part.pooled for part in parts if part.pooled is not None]
        masked = any(part.mask is not None or part.embeds.shape[1] != length for part in parts)
        return cls(
            embeds=torch.cat([_lengthened(part.embeds, length) for part in parts]),
            pooled=torch.cat(pooled) if pooled else None,
            mask=torch.cat([_lengthened(part.tokens(), length) for part in parts])
            if masked
            else None,
        )

    def tokens(self) -> Tensor:
        """The mask [P, L] bool, whether one is held or not."""
        return (
            torch.ones_like(self.embeds[..., 0], dtype=torch.bool)
            if self.mask is None
            else self.mask
        )


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    """Zeros (or False) on the right of the second dimension, up to `length`."""
    padded = tensor.new_zeros((tensor.shape[0], length, *tensor.shape[2:]))
    padded[:, : tensor.shape[1]] = tensor
    return padded


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What a rollout was asked to do. An engine echoes the one it used; the trainer refuses any
    difference.
    """

    dtype: str

    def differences(self, other: Spec) -> list[str]:
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [
            f"{name}: {mine!r} here, {theirs!r} there"
            for name, mine, theirs in pairs
            if mine != theirs
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSpec(Spec):
    """How images or videos are sampled. true_cfg_scale: None where there is none; num_frames: None
    for images.
    """

    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    noise_level: float
    sde_type: str
    log_prob_convention: str
    max_sequence_length: int
    true_cfg_scale: float | None = None
    num_frames: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpec(Spec):
    """How responses are sampled: from the whole distribution at `temperature`, at most
    `response_length` tokens.
    """

    temperature: float
    prompt_length: int
    response_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Trajectories of B samples and what the trainer learns about them, for images and text alike.

    group, seed, policy_version [B] int64; `group` is the prompt's slot in the global batch
    rollout_log_probs  [B, T] fp32  of the policy that sampled; None if the engine did not record them
    old_log_probs      [B, T] fp32  None until bypass mode or the recompute fills it
    rollout_is_weights [B, T]       None where no weights apply; no gradient
    rejection_mask     [B, T] bool  True where the step is kept; None means that all valid ones are
    advantages         [B, T]       None until the rewards are known
    """

    shared: ClassVar[tuple[str, ...]] = ("spec",)
    spec: Spec
    group: Tensor
    seed: Tensor
    policy_version: Tensor
    rollout_log_probs: Tensor | None = None
    old_log_probs: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    rejection_mask: Tensor | None = None
    advantages: Tensor | None = None

    def __len__(self) -> int:
        return len(self.group)

    @property
    def num_steps(self) -> int:
        """T."""
        return self.valid.shape[1]

    @property
    def valid(self) -> Tensor:
        """[B, T] bool, False where there is no step: the padding of responses."""
        raise NotImplementedError

    @property
    def num_elements(self) -> int:
        """How many elements the log-prob of a step is the mean of."""
        raise NotImplementedError

    def with_old(self, log_probs: Tensor, means: Tensor | None) -> Self:
        """The batch with another old policy than the rollout's: its log-probs [B, T] and, where
        they are needed, the means of its steps."""
        raise NotImplementedError

    def wholly_rejected(self) -> Tensor:
        """Returns the samples [B] bool that have steps, all of which the correction rejected.

        They must not shift the mean of their group.
        """
        if self.rejection_mask is None:
            return torch.zeros_like(self.group, dtype=torch.bool)
        return self.valid.any(1) & ~(self.valid & self.rejection_mask).any(1)

    def replace(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def rows(self, start: int, stop: int) -> Self:
        """Samples start..stop. What the samples share stays whole."""
        return replace(
            self, **{name: value[start:stop] for name, value in self.per_sample().items()}
        )

    def select(self, index: Tensor) -> Self:
        """The samples at `index` [B'] int64."""
        return replace(self, **{name: value[index] for name, value in self.per_sample().items()})

    def per_sample(self) -> dict[str, Any]:
        """The fields with one row per sample, by name, without those that are None."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.shared}
        return {name: value for name, value in columns.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionBatch(Batch):
    """Trajectories of images inside their SDE window; fp32 unless said otherwise.

    all_latents        [B, T+1, ...]  states x_t of the window; entry t+1 is the stored result of step t
    all_timesteps      [B, T]         what the transformer receives (sigma x 1000)
    step_indices       [B, T] int64   position of each step in the schedule
    sigmas             [S+1]          the schedule, so that both sides use the same bits by index
    prev_sample_mean   [B, T, ...]    mean of the reverse step under the policy that others are compared with: the
                                      rollout's and, once they are recomputed, the old one's; None
                                      unless a loss or a criterion needs it
    conditioning       of the P prompts; `prompt_index` [B] says which row belongs to a sample
    negative           of the P negative prompts, or None without guidance

    Log-probs are means over latent dimensions.
    """

    shared: ClassVar[tuple[str, ...]] = ("spec", "sigmas", "conditioning", "negative")
    spec: SamplerSpec
    all_latents: Tensor
    all_timesteps: Tensor
    step_indices: Tensor
    sigmas: Tensor
    conditioning: Conditioning
    prompt_index: Tensor
    negative: Conditioning | None = None
    prev_sample_mean: Tensor | None = None

    @property
    def valid(self) -> Tensor:
        return torch.ones_like(self.step_indices, dtype=torch.bool)

    @property
    def num_elements(self) -> int:
        return self.all_latents.shape[2:].numel()

    def with_old(self, log_probs: Tensor, means: Tensor | None) -> Self:
        return self.replace(old_log_probs=log_probs, prev_sample_mean=means)

    def step(self, t: int) -> DiffusionBatch:
        """SDE step t alone, as a batch with T = 1."""
        columns = self.per_sample()
        per_step: dict[str, Any] = {
            name: columns[name][:, t : t + 1] for name in _STEP_COLUMNS if name in columns
        }
        return replace(self, all_latents=self.all_latents[:, t : t + 2], **per_step)


_STEP_COLUMNS = (
    "all_timesteps",
    "step_indices",
    "prev_sample_mean",
    "rollout_log_probs",
    "old_log_probs",
    "rollout_is_weights",
    "rejection_mask",
    "advantages",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch(Batch):
    """Responses of a language model; a step is a token, the end-of-sequence token included.

    prompt_ids    [B, L] int64  padded on the left
    prompt_mask   [B, L] bool   True for the prompt's tokens
    response_ids  [B, T] int64  padded on the right
    response_mask [B, T] bool   True for the response's tokens; a row without any is an empty response
    """

    spec: TokenSpec
    prompt_ids: Tensor
    prompt_mask: Tensor
    response_ids: Tensor
    response_mask: Tensor

    @property
    def valid(self) -> Tensor:
        return self.response_mask

    @property
    def num_elements(self) -> int:
        return 1

    def with_old(self, log_probs: Tensor, means: Tensor | None) -> Self:
        return self.replace(old_log_probs=log_probs)


B = TypeVar("B", bound=Batch)


def concat(batches: Sequence[B]) -> B:
    """The rows of several batches of one rollout, in order. They must have in common what their
    rows share.

    Responses and prompts of different lengths are padded to the longest. Chunks that bring the
    conditioning of their own prompts get one of all prompts.
    """
    batches = _with_one_conditioning(batches)
    first = batches[0]
    for name in first.shared:
        if not all(_same(getattr(first, name), getattr(batch, name)) for batch in batches):
            raise ValueError(
                f"only batches of one rollout can be joined: their {name} is not the same"
            )
    columns = [batch.per_sample() for batch in batches]
    return first.replace(
        **{name: _stack(name, [column[name] for column in columns]) for name in columns[0]}
    )


def _with_one_conditioning(batches: Sequence[B]) -> Sequence[B]:
    """Batches that share one conditioning of the prompts of all of them; others than images are
    left as they are.
    """
    images = [batch for batch in batches if isinstance(batch, DiffusionBatch)]
    if all(batch.conditioning is images[0].conditioning for batch in images):
        return batches
    conditioning = Conditioning.join([batch.conditioning for batch in images])
    given = [batch.negative for batch in images if batch.negative is not None]
    negative = Conditioning.join(given) if given else None
    starts = [sum(len(batch.conditioning) for batch in images[:i]) for i in range(len(images))]
    return [
        batch.replace(
            conditioning=conditioning, negative=negative, prompt_index=batch.prompt_index + start
        )
        for batch, start in zip(images, starts, strict=True)
    ]


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or (not isinstance(one, Conditioning) and one == other)


def _stack(name: str, parts: Sequence[Tensor]) -> Tensor:
    """Rows of all parts; the second dimension grows to the longest, on the left for a prompt's
    columns.
    """
    if parts[0].ndim < 2 or len({part.shape[1] for part in parts}) == 1:
        return torch.cat(list(parts))
    length = max(part.shape[1] for part in parts)
    pads = [length - part.shape[1] for part in parts]
    left = name.startswith("prompt_")
    return torch.cat(
        [
            torch.nn.functional.pad(part, (pad, 0) if left else (0, pad))
            for part, pad in zip(parts, pads, strict=True)
        ]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Rewards of B samples.

    total [B] float64: weighted sum, undefined where not valid; valid [B] bool: False where any
    reward failed;
    parts: name -> [B] float64, each reward and what it logs apart (NaN where it failed).
    """

    total: Tensor
    valid: Tensor
    parts: Mapping[str, Tensor]
