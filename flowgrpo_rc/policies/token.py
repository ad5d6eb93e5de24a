"""A language model as a stochastic policy over tokens: sampling and re-evaluation from the same
token maths.

Legend: B rows, L tokens of the longest prompt, T tokens of the longest response, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from flowgrpo_rc.batch import TokenBatch, TokenSpec
from flowgrpo_rc.core.kl import k3
from flowgrpo_rc.core.tokens import positions, sample_tokens, token_log_probs, until_end
from flowgrpo_rc.models.causal_lm import CausalLM, gradient_checkpointing
from flowgrpo_rc.policies.base import Policy, nudge

# A diverged log-ratio is bounded before its exponential, as the weights' and the loss's are.
_LARGEST = 20.0


class Responses(NamedTuple):
    """ids [B, T] int64, padded on the right; mask [B, T] bool, True up to and including the end
    token; log_probs [B, T] fp32 at the temperature of the sampling, 0 at padding."""

    ids: Tensor
    mask: Tensor
    log_probs: Tensor


class TokenEvaluation(NamedTuple):
    """A policy on recorded responses: log_probs [B, T] fp32, 0 at padding. A token is drawn from no
    Gaussian.
    """

    log_probs: Tensor
    gaussian: None = None
    means: None = None


class TokenPolicy(Policy[TokenBatch, TokenEvaluation]):
    """`network` seen as a policy. Several policies (trainer, engine) share one CausalLM.

    checkpoint_gradients: hold less during `evaluate` and compute it again in the backward.
    """

    def __init__(
        self,
        model: CausalLM,
        network: Any,
        *,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        checkpoint_gradients: bool = False,
    ) -> None:
        self.model = model
        self.network = network
        self._autocast = autocast
        self._checkpoint_gradients = checkpoint_gradients

    @torch.no_grad()
    def rollout(
        self, prompt_ids: Tensor, prompt_mask: Tensor, spec: TokenSpec, uniforms: Tensor
    ) -> Responses:
        """Continue prompts [B, L] (padded on the left) by at most `spec.response_length` tokens.

        Row i draws its t-th token with uniforms[i, t], so what it says does not depend on the rows
        beside it.
        uniforms: [B, spec.response_length] in [0, 1). With temperature 0 they have no effect: the
        likeliest token is taken, which then has log-probability 0.
        """
        sampler = _Sampler(uniforms.to(prompt_ids.device), spec.temperature)
        settings = GenerationConfig(
            max_new_tokens=spec.response_length,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            pad_token_id=self.model.pad_id,
            eos_token_id=list(self.model.eos_ids),
        )
        with self._autocast():
            rows = self.network.generate(
                prompt_ids,
                attention_mask=prompt_mask.long(),
                generation_config=settings,
                logits_processor=LogitsProcessorList([sampler]),
            )
        ids = rows[:, prompt_ids.shape[1] :]
        mask = until_end(ids, torch.tensor(self.model.eos_ids, device=ids.device))
        return Responses(ids, mask, sampler.log_probs().masked_fill(~mask, 0.0))

    def evaluate(self, piece: TokenBatch) -> TokenEvaluation:
        """This policy on the recorded responses; differentiable."""
        ids = torch.cat([piece.prompt_ids, piece.response_ids], 1)
        mask = torch.cat([piece.prompt_mask, piece.response_mask], 1)
        checkpointing = self._checkpoint_gradients and torch.is_grad_enabled()
        with (
            self._autocast(),
            gradient_checkpointing(self.network) if checkpointing else nullcontext(),
        ):
            # The last token predicts nothing that was recorded, and only the T before the ends of
            # the rows are scored.
            logits = self.network(
                input_ids=ids[:, :-1],
                attention_mask=mask[:, :-1].long(),
                position_ids=positions(mask)[:, :-1],
                logits_to_keep=piece.num_steps,
                use_cache=False,
            ).logits
        log_probs = token_log_probs(logits, piece.response_ids, piece.spec.temperature)
        return TokenEvaluation(log_probs.masked_fill(~piece.response_mask, 0.0))

    def pieces(self, micro: TokenBatch) -> Iterator[TokenBatch]:
        """One: a forward sees all tokens."""
        yield micro

    def divergence(
        self, now: TokenEvaluation, reference: TokenEvaluation, piece: TokenBatch
    ) -> Tensor:
        """GRPO's estimate of KL(now | reference) at the sampled tokens, arXiv 2402.03300 (4); 0 at
        padding.
        """
        return k3((reference.log_probs - now.log_probs).clamp(-_LARGEST, _LARGEST))

    def cells(self, batch: TokenBatch) -> Tensor:
        """One for all: a token's position says little."""
        return torch.zeros_like(batch.response_ids)

    def cell_names(self, batch: TokenBatch) -> Sequence[str]:
        return [""]

    def under(self, autocast: Callable[[], AbstractContextManager[Any]]) -> TokenPolicy:
        return TokenPolicy(
            self.model,
            self.network,
            autocast=autocast,
            checkpoint_gradients=self._checkpoint_gradients,
        )

    def nudged(self) -> TokenPolicy:
        return _NudgedTokenPolicy(self.model, self.network, autocast=self._autocast)


class _NudgedTokenPolicy(TokenPolicy):
    def evaluate(self, piece: TokenBatch) -> TokenEvaluation:
        embeddings = self.network.get_input_embeddings()
        hook = embeddings.register_forward_hook(
            lambda module, given, found: nudge(found, found.dtype)
        )
        try:
            return super().evaluate(piece)
        finally:
            hook.remove()


class _Sampler(LogitsProcessor):
    """Draws the token itself and leaves it as the only one that a greedy search can take; keeps its
    log-probability.

    uniforms [B, T]; column t serves the t-th call.
    """

    def __init__(self, uniforms: Tensor, temperature: float) -> None:
        self._uniforms, self._temperature = uniforms, temperature
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._temperature == 0:
            self._log_probs.append(scores.new_zeros(len(scores)))
            return scores
        chosen = sample_tokens(
            scores, self._uniforms[:, len(self._log_probs)], self._temperature
        ).unsqueeze(1)
        self._log_probs.append(
            token_log_probs(scores.unsqueeze(1), chosen, self._temperature).squeeze(1)
        )
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    def log_probs(self) -> Tensor:
        """[B, T] fp32, whatever stands in rows that had ended."""
        return torch.stack(self._log_probs, 1).float()
