"""The dataclasses that pass between data, rollout, rewards, correction and update.

Legend:
    P  prompts of this process
    B  samples of this process, P times the samples per prompt
    T  steps: SDE steps of the window, or tokens of the longest response
    S  denoising steps of the schedule
    L  text tokens of the longest prompt
    E  width of a text embedding
    N  tokens of the condition images of a prompt, C their width
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

# A plain text, or the messages of a chat.
Said = str | tuple[Mapping[str, object], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a prompt file."""

    text: str  # the prompt itself; of a chat, what its user says last
    index: int  # position among all prompts of the files
    target: str | None = None  # what a reward compares with, such as the text that OCR should read
    negative_text: str = ""  # used under classifier-free guidance
    images: tuple[str | bytes, ...] = ()  # paths or contents, for `pictures.read_picture`
    metadata: Mapping[str, object] = field(default_factory=dict)  # all other keys, for rewards
    messages: tuple[Mapping[str, object], ...] = ()  # the chat to answer; empty for a plain text

    @property
    def said(self) -> Said:
        """Returns what a language model is given: the chat if there is one, or else the text."""
        return self.messages or self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptBatch:
    """The prompts of one training step that this process samples."""

    step: int
    prompts: Sequence[Prompt]  # [P]
    # [P]; position of each prompt in the global batch of the step. Noise is seeded by it, so the
    # draws do not depend on how many processes share the batch.
    slots: Sequence[int]


ImageSizes = tuple[tuple[int, int], ...]  # rows and columns of tokens of a prompt's images


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditioning:
    """Encoded prompts, as a transformer is conditioned on them."""

    embeds: Tensor  # of the tokens, [P, L, E]
    pooled: Tensor | None = None  # one of each prompt, [P, E'] with a width of its own, if used
    mask: Tensor | None = None  # bool, [P, L]; False at padding. None: every token counts
    # Tokens of the condition images, one image after the other, [P, N, C], padded on the right, and
    # which of them exist, [P]; None and empty without images.
    images: Tensor | None = None
    image_sizes: tuple[ImageSizes, ...] = ()
    # What forwards of some models would wait for the device to tell: the number of tokens of each
    # prompt, and the timestep of each row. Empty: nobody has asked.
    lengths: tuple[int, ...] = ()
    timesteps: tuple[float, ...] = ()

    def __getitem__(self, rows: Tensor) -> Conditioning:
        return self.take(rows, rows.tolist() if self.image_sizes or self.lengths else ())

    def take(self, rows: Tensor, listed: Sequence[int]) -> Conditioning:
        """Returns some rows without a wait; `listed` on the host, for what only the host knows."""
        taken: dict[str, Any] = {}
        for name, value in ((f.name, getattr(self, f.name)) for f in fields(self)):
            if isinstance(value, tuple):
                taken[name] = tuple(value[row] for row in listed) if value else ()
            elif value is not None:
                taken[name] = value[rows]
        return Conditioning(**taken)

    def __len__(self) -> int:
        return len(self.embeds)

    @classmethod
    def join(cls, parts: Sequence[Conditioning]) -> Conditioning:
        """Joins conditionings of one model into one with the prompts of all, in order.

        Shorter ones are padded on the right and masked there. The mask is None if no part has one
        and none is padded.
        """
        length = max(part.embeds.shape[1] for part in parts)
        pooled = [part.pooled for part in parts if part.pooled is not None]
        mask = None
        if any(part.mask is not None or part.embeds.shape[1] != length for part in parts):
            mask = torch.cat([_lengthened(part.tokens(), length) for part in parts])
        images = [part.images for part in parts if part.images is not None]
        most = max((tokens.shape[1] for tokens in images), default=0)
        return cls(
            embeds=torch.cat([_lengthened(part.embeds, length) for part in parts]),
            pooled=torch.cat(pooled) if pooled else None,
            mask=mask,
            images=torch.cat([_lengthened(part, most) for part in images]) if images else None,
            image_sizes=tuple(sizes for part in parts for sizes in part.image_sizes),
        )

    def counted(self) -> Conditioning:
        """Returns it with `lengths`, for which the host waits, if padding is masked."""
        if self.mask is None or self.lengths:
            return self
        return replace(self, lengths=tuple(self.mask.sum(1).tolist()))

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors by name, contiguous."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: x.contiguous() for name, x in values.items() if isinstance(x, Tensor)}

    def to(self, device: torch.device) -> Conditioning:
        """Returns the same on a device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in self.tensors().items()}
        return replace(self, **moved)

    def tokens(self) -> Tensor:
        """Returns the mask of the tokens, bool, [P, L], also where None stands for all True."""
        if self.mask is None:
            return torch.ones_like(self.embeds[..., 0], dtype=torch.bool)
        return self.mask


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    """Pads the second dimension with zeros (or False) on the right, up to `length`."""
    padded = tensor.new_zeros((tensor.shape[0], length, *tensor.shape[2:]))
    padded[:, : tensor.shape[1]] = tensor
    return padded


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """The settings of a rollout that its log-probabilities depend on.

    An engine sends back the spec that it used, and the trainer refuses any difference from its own.
    """

    dtype: str  # precision of the rollout's weights, such as `bf16` or `bf16+int8`
    tf32: bool = False  # whether products of fp32 matrices round to TF32; in older files False

    def differences(self, other: Spec) -> list[str]:
        """Lists the fields in which two specs of a class differ, with both values."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [
            f"{name}: {mine!r} here, {theirs!r} there"
            for name, mine, theirs in pairs
            if mine != theirs
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerSpec(Spec):
    """The settings by which images or videos are sampled."""

    height: int  # of a picture, in pixels
    width: int
    num_inference_steps: int  # denoising steps of the schedule, S
    guidance_scale: float  # what it means depends on the model (`FlowModel`)
    noise_level: float  # scale of the noise of stochastic steps
    sde_type: str  # a kind of `core.transition`
    log_prob_convention: str  # `gaussian` or `peers`, see `core.transition.log_prob`
    max_sequence_length: int  # the most text tokens of a prompt
    true_cfg_scale: float | None = None  # on a negative prompt, for models with both kinds
    guidance_scale_2: float | None = None  # of a second transformer; None: guidance_scale
    num_frames: int | None = None  # of a video; None for images
    condition_images: int = 0  # the most condition images of a prompt
    condition_pixels: int = 2**20  # the area of a condition image that the model is given
    tail: str = "euler"  # solver of the ODE steps from `tail_start` on, one of `TAILS`
    tail_start: int | None = None  # the first step behind every window; None: no step is
    tail_steps: int | None = None  # the most evaluations from there on; None: as scheduled
    shared_prefix: bool = False  # whether the samples of a prompt start from the same noise
    # The evaluations of a sample that use the middle blocks' residual again.
    cached_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Takes a list, as JSON has it, for a tuple."""
        object.__setattr__(self, "cached_steps", tuple(self.cached_steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpec(Spec):
    """The settings by which responses are sampled, always from the whole vocabulary."""

    temperature: float  # the logits are divided by it; 0 takes the likeliest token
    prompt_length: int  # the most tokens of a prompt
    response_length: int  # the most tokens of a response


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(ABC):
    """Trajectories of B samples and what the trainer learns about them, for images and text alike.

    A field with one row per sample follows the samples through `rows` and `select`. The fields
    named in `shared`, which all samples have in common, stay whole.
    """

    shared: ClassVar[tuple[str, ...]] = ("spec",)
    spec: Spec  # the settings that the rollout used
    group: Tensor  # int64, [B]; the slot of the prompt in the global batch, which its samples share
    seed: Tensor  # int64, [B]
    policy_version: Tensor  # int64, [B]; the step after which the sampling weights were taken
    rollout_log_probs: Tensor | None = None  # fp32, [B, T]; None if the engine recorded none
    # fp32, [B, T]; of the policy that the clip is about. None until bypass mode or the recompute.
    old_log_probs: Tensor | None = None
    rollout_is_weights: Tensor | None = None  # [B, T], without gradient; None: no weights apply
    rejection_mask: Tensor | None = None  # bool, [B, T]; True where kept. None rejects nothing
    advantages: Tensor | None = None  # [B, T]; None until the rewards are known

    def __len__(self) -> int:
        return len(self.group)

    @property
    def num_steps(self) -> int:
        """Returns T."""
        return self.step_mask.shape[1]

    @property
    @abstractmethod
    def step_mask(self) -> Tensor:
        """Returns which steps exist, bool, [B, T]; False at the padding of responses."""

    @property
    @abstractmethod
    def ends(self) -> Tensor:
        """Returns what each sample has become, [B, ...]; equal only for samples that are equal."""

    @property
    @abstractmethod
    def num_elements(self) -> int:
        """Returns the number of elements, D, that the log-probability of a step is a mean over."""

    def with_old(
        self, log_probs: Tensor, means: Tensor | None = None, centered: Tensor | None = None
    ) -> Self:
        """Returns the batch with another old policy than the rollout's: its log-probs [B, T], the
        means of its steps [B, T, ...] and its centered log-ratio to the rollout [B, T], where these
        are needed.
        """
        return self.replace(old_log_probs=log_probs)

    def wholly_rejected(self) -> Tensor:
        """Returns the samples [B] bool that have steps, all of which the correction rejected.

        They must not shift the mean of their group.
        """
        if self.rejection_mask is None:
            return torch.zeros_like(self.group, dtype=torch.bool)
        return self.step_mask.any(1) & ~(self.step_mask & self.rejection_mask).any(1)

    def replace(self, **changes: Any) -> Self:
        """Returns the batch with other values in some fields."""
        return replace(self, **changes)

    def rows(self, start: int, stop: int) -> Self:
        """Returns a range of samples, as views; `stop` may exceed B."""
        return self.select(slice(start, stop))

    def split(self, size: int) -> list[Self]:
        """Cuts the batch into batches of `size` consecutive samples, the last one of the rest."""
        return [self.rows(start, start + size) for start in range(0, len(self), size)]

    def select(self, index: Tensor | slice) -> Self:
        """Returns the samples at the positions `index`, int64 [B'], in any order and number."""
        # Blocking, the copy of an index of the host would wait for all that the device has to do.
        rows = index
        if isinstance(index, Tensor):
            rows = index.to(self.group.device, non_blocking=True)
        return replace(self, **{name: value[rows] for name, value in self.per_sample().items()})

    def per_sample(self) -> dict[str, Any]:
        """Returns the fields with one row per sample, by name, without those that are None."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in self.shared}
        return {name: value for name, value in columns.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionBatch(Batch):
    """Trajectories of images or videos inside their SDE window; fp32 unless said otherwise.

    The log-probability of a step is a mean over its D latent elements.
    """

    shared: ClassVar[tuple[str, ...]] = ("spec", "sigmas", "conditioning", "negative")
    spec: SamplerSpec
    # [B, T+1, ...]; the states of the window. Entry t + 1 is the result of step t. A sample without
    # a window has its final latents in place of all states.
    all_latents: Tensor
    all_timesteps: Tensor  # [B, T]; what the transformer receives, sigma x 1000
    step_indices: Tensor  # int64, [B, T]; position of each step in the schedule
    sigmas: Tensor  # [S+1]; the schedule, from which both sides take it: so they use the same bits
    conditioning: Conditioning  # the encoded prompts, [P]
    prompt_index: Tensor  # int64, [B]; the row of `conditioning` that belongs to each sample
    negative: Conditioning | None = None  # the encoded negative prompts, [P]; None: no guidance
    # Mean of each step, [B, T, ...], under the policy that sampled, where the correction, a loss or
    # a criterion needs it; under the old policy, where that is another and a loss needs it.
    prev_sample_mean: Tensor | None = None
    old_means: Tensor | None = None
    # [B, T]; centered log-ratio of the old policy to the rollout. None if the old policy is the
    # rollout's, whose is 0, or if the loss is not centered.
    old_centered: Tensor | None = None
    loss_bound: Tensor | None = None  # [B, T]; where it follows the mismatch (`clip_ratio=auto:k`)
    # prompt_index and all_timesteps once more, float64 on the host, [B, T, 2]; of parts of a batch
    # (`split`), in which both stay as they are.
    on_host: Tensor | None = None

    def split(self, size: int) -> list[Self]:
        """Cuts as `Batch.split` does; forwards of the parts need not wait for the device."""
        if self.on_host is not None:
            return Batch.split(self, size)
        prompts = self.prompt_index.unsqueeze(1).expand_as(self.all_timesteps)
        whole = replace(
            self,
            on_host=torch.stack([prompts.double(), self.all_timesteps.double()], dim=2).cpu(),
            conditioning=self.conditioning.counted(),
            negative=None if self.negative is None else self.negative.counted(),
        )
        return Batch.split(whole, size)

    @property
    def step_mask(self) -> Tensor:
        """Returns True for every step, bool, [B, T], since all windows have T steps."""
        return torch.ones_like(self.step_indices, dtype=torch.bool)

    @property
    def ends(self) -> Tensor:
        """Returns the last states of the window, [B, ...]; what comes after is deterministic."""
        return self.all_latents[:, -1]

    @property
    def num_elements(self) -> int:
        """Returns the number of elements of one sample's latents, D."""
        return self.all_latents.shape[2:].numel()

    def with_old(
        self, log_probs: Tensor, means: Tensor | None = None, centered: Tensor | None = None
    ) -> Self:
        """Returns the batch with another old policy, as `Batch.with_old` says.

        The means of the rollout stay if the log-ratio is centered, and are dropped otherwise.
        """
        return self.replace(
            old_log_probs=log_probs,
            old_means=means,
            old_centered=centered,
            prev_sample_mean=None if centered is None else self.prev_sample_mean,
        )

    def step(self, t: int) -> DiffusionBatch:
        """Returns one SDE step of each sample, by its position in the window; T = 1."""
        return self.steps(t, t + 1)

    def steps(self, start: int, stop: int) -> DiffusionBatch:
        """Returns a range of the SDE steps of each sample, as views; `stop` may exceed T."""
        whole = ("group", "seed", "policy_version", "prompt_index", "all_latents")
        per_step: dict[str, Any] = {
            name: value[:, start:stop]
            for name, value in self.per_sample().items()
            if name not in whole
        }
        return replace(self, all_latents=self.all_latents[:, start : stop + 1], **per_step)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch(Batch):
    """Responses of a language model. A step is a token, the end-of-sequence token included."""

    spec: TokenSpec
    prompt_ids: Tensor  # int64, [B, L], padded on the left
    prompt_mask: Tensor  # bool, [B, L]; True for the tokens of the prompt
    response_ids: Tensor  # int64, [B, T], padded on the right
    response_mask: Tensor  # bool, [B, T]; a row without any token is an empty response
    # How many tokens prompt and response have, int64 on the host, [B, 2], so that nobody waits for
    # a device to tell; None: only the masks tell.
    lengths: Tensor | None = None

    def select(self, index: Tensor | slice) -> Self:
        """Returns the samples at the positions `index`; lengths stay known if it is on the host."""
        lengths = None
        if self.lengths is not None and (isinstance(index, slice) or index.device.type == "cpu"):
            lengths = self.lengths[index]
        return Batch.select(self.replace(lengths=None), index).replace(lengths=lengths)

    def counted(self) -> Tensor | None:
        """Returns the lengths, which the masks tell on a CPU; None if only a device knows them."""
        if self.lengths is None and self.group.device.type == "cpu":
            return torch.stack([self.prompt_mask.sum(1), self.response_mask.sum(1)], dim=1)
        return self.lengths

    @property
    def step_mask(self) -> Tensor:
        """Returns the mask of the responses, bool, [B, T]."""
        return self.response_mask

    @property
    def ends(self) -> Tensor:
        """Returns the tokens, [B, T]; -1 at the padding."""
        return self.response_ids.masked_fill(~self.response_mask, -1)

    @property
    def num_elements(self) -> int:
        """Returns 1: a token is one element."""
        return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewards:
    """Rewards of B samples."""

    total: Tensor  # weighted sum of the rewards, float64, [B]; undefined where not valid
    valid: Tensor  # bool, [B]; False where any reward failed
    parts: Mapping[str, Tensor]  # [B] float64: each reward and further value; NaN where it failed

    def select(self, index: Tensor) -> Rewards:
        """Returns the rewards of the samples at the positions `index`, int64 [B']."""
        parts = {name: values[index] for name, values in self.parts.items()}
        return Rewards(total=self.total[index], valid=self.valid[index], parts=parts)

    @classmethod
    def join(cls, several: Sequence[Rewards]) -> Rewards:
        """Joins the rewards of several batches, in order."""
        return cls(
            total=torch.cat([one.total for one in several]),
            valid=torch.cat([one.valid for one in several]),
            parts={n: torch.cat([one.parts[n] for one in several]) for n in several[0].parts},
        )
