"""Responses of a language model: sampled for training, likeliest for evaluation.

`rollout.val_kwargs.temperature` above 0 samples in evaluation, too.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from flowgrpo_rc.batch import Prompt, PromptBatch, TokenBatch
from flowgrpo_rc.core.metrics import MetricBag
from flowgrpo_rc.core.random import uniform
from flowgrpo_rc.correction.correct import require_rollout_log_probs
from flowgrpo_rc.evaluation.held_out import HeldOut
from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.records.samples import Shown, save_texts
from flowgrpo_rc.rollout.config import RolloutConfig
from flowgrpo_rc.rollout.engine import TextRequest
from flowgrpo_rc.training.tasks.task import Task


@dataclass(eq=False)
class TextTask(Task):
    """The task of a language model."""

    model: CausalLM
    policy: TokenPolicy
    config: RolloutConfig
    _: KW_ONLY
    tf32: bool = False

    def __post_init__(self) -> None:
        """Prepares the sampler of held-out responses."""
        temperature = self.config.val_kwargs.temperature
        self._held_out = replace(self.config.token_spec(), temperature=temperature, dtype="")

    def request(self, prompts: PromptBatch, seeds: Sequence[int]) -> TextRequest:
        """Asks for `rollout.n` responses to each prompt."""
        return TextRequest(
            prompts=prompts,
            samples_per_prompt=self.config.n,
            spec=self.config.token_spec(tf32=self.tf32),
            seeds=seeds,
        )

    def origin(self) -> dict[str, object]:
        """Returns the vocabulary's hash: the ids of another one mean other texts."""
        vocabulary = json.dumps(sorted(self.model.tokenizer.get_vocab().items())).encode()
        return {"vocabulary_sha256": hashlib.sha256(vocabulary).hexdigest()}

    def check_rollout(self, batch: TokenBatch) -> None:
        """Raises ValueError unless the rollout has log-probs."""
        require_rollout_log_probs(batch)

    def observe(self, batch: TokenBatch, shown: Shown, step: int) -> MetricBag:
        """Measures lengths in tokens, with the end token, and shares of cut and empty responses."""
        lengths = batch.response_mask.sum(1)
        ends = torch.isin(
            batch.response_ids, torch.tensor(self.model.eos_ids, device=lengths.device)
        )
        ended = (ends & batch.response_mask).any(1)
        metrics = MetricBag()
        metrics.mean("response/length_mean", lengths)
        metrics.max("response/length_max", lengths)
        metrics.min("response/length_min", lengths)
        metrics.mean("response/limit_fraction", ~ended & (lengths == batch.spec.response_length))
        metrics.mean("response/empty_fraction", lengths - ended.long() == 0)
        return metrics

    def sample(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], *, decode: bool = True
    ) -> HeldOut:
        """Draws the response to each prompt, as text."""
        spec = self._held_out
        ids, mask = self.model.encode(
            [prompt.said for prompt in prompts], max_length=spec.prompt_length
        )
        responses = self.policy.rollout(
            ids, mask, spec, uniform((spec.response_length,), seeds, "tokens")
        )
        return HeldOut(self.model.decode(responses.ids, responses.mask))

    def save_samples(
        self,
        stem: Path,
        samples: Sequence[str],
        prompts: Sequence[Prompt],
        scores: Sequence[float],
    ) -> Image.Image | None:
        """Writes `stem`.jsonl, one object a line; there is no picture."""
        save_texts(stem.with_suffix(".jsonl"), samples, prompts, scores)
        return None
