"""A language model as a stochastic policy: sampling and re-evaluation through the same token maths.

Legend: B rows, L tokens of the longest prompt, T tokens of the longest response, V tokens of the
vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)

from flowgrpo_rc.batch import TokenBatch, TokenSpec
from flowgrpo_rc.core.kl import k3
from flowgrpo_rc.core.tokens import positions, sample_tokens, token_log_probs, until_end
from flowgrpo_rc.models.causal_lm import CausalLM, gradient_checkpointing
from flowgrpo_rc.policies.base import Evaluation, Policy, nudge

# Bound on |log-ratio| before its exponential, so that a diverged policy gives large numbers and no
# inf. The correction weights and the losses have the same bound.
_LARGEST = 20.0
MOST_PADDING = 0.2  # share of padding above which rows are sorted and columns are cut


class Responses(NamedTuple):
    """Sampled responses, padded on the right."""

    ids: Tensor  # tokens, int64, [B, T]
    mask: Tensor  # bool, [B, T]; True up to and including the end token
    log_probs: Tensor  # at the temperature of the sampling, fp32, [B, T], in nats; 0 at padding


@dataclass(eq=False, repr=False)
class TokenPolicy(Policy[TokenBatch]):
    """A causal language model as a policy over tokens.

    The policies of the trainer and of an engine share one `CausalLM` and have a network each. To
    `checkpoint_gradients` keeps fewer activations in `evaluate`, and computes the others again in
    the backward pass.
    """

    model: CausalLM
    network: PreTrainedModel
    _: KW_ONLY
    checkpoint_gradients: bool = False

    @torch.no_grad()
    def rollout(
        self, prompt_ids: Tensor, prompt_mask: Tensor, spec: TokenSpec, uniforms: Tensor
    ) -> Responses:
        """Samples one response to each prompt, of at most spec.response_length tokens.

        Row i draws its t-th token with uniforms[i, t]. So a response does not depend on the other
        rows of the batch. Temperature 0 takes the likeliest token, whose log-prob is then 0.

        Args:
          prompt_ids: int64, [B, L], padded on the left.
          prompt_mask: bool, [B, L]; True for the tokens of the prompt.
          spec: how to sample.
          uniforms: random numbers in [0, 1), [B, spec.response_length].
        """
        sampler = _Sampler(uniforms.to(prompt_ids.device), spec.temperature)
        # Greedy, with one token to choose from: so the draw is ours and can be repeated.
        settings = GenerationConfig(
            max_new_tokens=spec.response_length,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            pad_token_id=self.model.pad_id,
            eos_token_id=list(self.model.eos_ids),
        )
        with self.autocast():
            rows = self.network.generate(
                prompt_ids,
                attention_mask=prompt_mask.long(),
                generation_config=settings,
                logits_processor=LogitsProcessorList([sampler]),
            )
        ids = rows[:, prompt_ids.shape[1] :]
        mask = until_end(ids, torch.tensor(self.model.eos_ids, device=ids.device))
        return Responses(ids, mask, sampler.log_probs().masked_fill(~mask, 0.0))

    def order(self, batch: TokenBatch, mini_batch_size: int) -> Tensor | None:
        """Sorts the rows of each mini-batch by length, if much of the batch is padding."""
        lengths = batch.counted()
        width = batch.prompt_ids.shape[1] + batch.num_steps
        if lengths is None or not _is_sparse(lengths, width):
            return None
        by_length = lengths.sum(1).argsort(stable=True)
        return by_length[(by_length // mini_batch_size).argsort(stable=True)]

    def evaluate(self, piece: TokenBatch) -> Evaluation:
        """Computes the log-probability of each recorded token in one forward.

        Args:
          piece: recorded responses, [B, T].

        Returns:
          The log-probabilities, differentiable in the weights; 0 at padding. A token is not drawn
          from a Gaussian.
        """
        ids = torch.cat([piece.prompt_ids, piece.response_ids], 1)
        mask = torch.cat([piece.prompt_mask, piece.response_mask], 1)
        # Columns that are padding in all rows need no forward.
        prompt_length = piece.prompt_ids.shape[1]
        first = 0
        num_tokens = piece.num_steps
        lengths = piece.counted()
        if lengths is not None and _is_sparse(lengths, mask.shape[1]):
            longest_prompt, longest_response = lengths.amax(0).tolist()
            first = prompt_length - longest_prompt
            num_tokens = longest_response
        num_tokens = max(num_tokens, 1)
        last = prompt_length + num_tokens
        checkpointed = self.checkpoint_gradients and torch.is_grad_enabled()
        saving = gradient_checkpointing(self.network) if checkpointed else nullcontext()
        with self.autocast(), saving, self._moved_embeddings():
            # The logits at a token score the next one. So the last token of a row is left out, and
            # the last positions of what remains score the response.
            columns = slice(first, last - 1)
            logits = self.network(
                input_ids=ids[:, columns],
                attention_mask=mask[:, columns].long(),
                position_ids=positions(mask)[:, columns],
                logits_to_keep=num_tokens,
                use_cache=False,
            ).logits
        tokens = piece.response_ids[:, :num_tokens]
        log_probs = token_log_probs(logits, tokens, piece.spec.temperature)
        log_probs = functional.pad(log_probs, (0, piece.num_steps - num_tokens))
        return Evaluation(log_probs.masked_fill(~piece.response_mask, 0.0))

    def pieces(self, micro: TokenBatch) -> Iterator[TokenBatch]:
        """Returns the whole micro-batch: one forward evaluates all tokens."""
        yield micro

    def steps(self, piece: TokenBatch, now: Evaluation) -> Iterator[tuple[TokenBatch, Evaluation]]:
        """Returns the whole piece: a loss sees all tokens."""
        yield piece, now

    def divergence(self, now: Evaluation, reference: Evaluation, piece: TokenBatch) -> Tensor:
        """Estimates KL(now | reference) at each token, as GRPO does.

            KL = r - 1 - log(r),   r = p_reference / p_now

        It is [B, T], in nats, 0 at padding, and differentiable in `now`.

        See "DeepSeekMath", https://arxiv.org/abs/2402.03300, equation 4.
        """
        return k3((reference.log_probs - now.log_probs).clamp(-_LARGEST, _LARGEST))

    def cells(self, batch: TokenBatch) -> Tensor:
        """Returns one cell for every token, since its position says little of its mismatch."""
        return torch.zeros_like(batch.response_ids)

    def cell_names(self, batch: TokenBatch) -> Sequence[str]:
        """Returns one empty name: the only cell gets no metric of its own."""
        return [""]

    def _moved_embeddings(self) -> AbstractContextManager[object]:
        """Moves the token embeddings in the forwards inside, if they are to be moved."""
        if not self._nudged:
            return nullcontext()
        embeddings: nn.Module = self.network.get_input_embeddings()
        # Embeddings are looked up inside the network, so a hook on that layer has to move them. As
        # a context, torch's handle removes it at the end.
        return embeddings.register_forward_hook(
            lambda module, ids, embeds: nudge(embeds, embeds.dtype)
        )


def _is_sparse(lengths: Tensor, width: int) -> bool:
    """Returns whether much is padding in rows of `width` tokens; `lengths` are on the host."""
    return int(lengths.sum()) / (len(lengths) * width) < 1 - MOST_PADDING


class _Sampler(LogitsProcessor):
    """Samples inside of transformers' `generate`, with random numbers and log-probs of ours.

    `generate` runs a greedy search. At each call this draws the token and leaves it as the only one
    that the search can take. Column t of the random numbers, [B, T], serves the t-th call;
    temperature 0 leaves the choice to the greedy search.
    """

    def __init__(self, uniforms: Tensor, temperature: float) -> None:
        self._uniforms = uniforms
        self._temperature = temperature
        self._log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._temperature == 0:
            self._log_probs.append(scores.new_zeros(len(scores)))
            return scores
        # A row's t-th token gets its t-th number, whichever rows have ended before.
        uniforms = self._uniforms[:, len(self._log_probs)]
        chosen = sample_tokens(scores, uniforms, self._temperature).unsqueeze(1)
        log_probs = token_log_probs(scores.unsqueeze(1), chosen, self._temperature).squeeze(1)
        self._log_probs.append(log_probs)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen, 0.0)

    def log_probs(self) -> Tensor:
        """The log-probability of each drawn token, fp32, [B, T]; arbitrary after a row's end."""
        return torch.stack(self._log_probs, 1).float()
