"""Rollouts of text in the trainer's process, through transformers, in a precision of their own."""

from collections.abc import Iterator, Sequence

import torch

from flowgrpo_rc.batch import TokenBatch
from flowgrpo_rc.core.random import uniform
from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.rollout.engine import RolloutChunk, TextRequest
from flowgrpo_rc.rollout.options.option import RolloutOption
from flowgrpo_rc.rollout.replica import Replica, ReplicaEngine


class TransformersEngine(ReplicaEngine[TextRequest]):
    """Samples with a copy of the LoRA-wrapped network."""

    kind = "causal_lm"

    def __init__(
        self,
        model: CausalLM,
        network: torch.nn.Module,
        *,
        dtype: str,
        chunk_size: int,
        options: Sequence[RolloutOption] = (),
    ) -> None:
        self._replica = Replica(network, dtype, options)
        self._policy = TokenPolicy(model, self._replica.network)
        self._model = model
        self._chunk_size = chunk_size

    def generate(self, request: TextRequest) -> Iterator[RolloutChunk]:
        """Yields chunks of `chunk_size` responses."""
        model = self._model
        spec = request.spec
        for rows in request.chunks(self._chunk_size):
            prompts = [request.prompt_of(row) for row in rows]
            seeds = [request.seeds[row] for row in rows]
            slots = [request.prompts.slots[row // request.samples_per_prompt] for row in rows]
            prompt_ids, prompt_mask = model.encode(
                [prompt.said for prompt in prompts], max_length=spec.prompt_length
            )
            uniforms = uniform((spec.response_length,), seeds, "tokens")
            responses = self._policy.rollout(prompt_ids, prompt_mask, spec, uniforms)
            # The decoding waits for the device, so the host counts tokens without another wait.
            response_mask = responses.mask.cpu()
            texts = model.decode(responses.ids, response_mask)
            lengths = torch.stack([prompt_mask.cpu().sum(1), response_mask.sum(1)], dim=1)
            group = torch.tensor(slots, device=model.device)
            batch = TokenBatch(
                spec=self._replica.spec(spec),
                prompt_ids=prompt_ids,
                prompt_mask=prompt_mask,
                response_ids=responses.ids,
                response_mask=responses.mask,
                rollout_log_probs=responses.log_probs,
                group=group,
                seed=torch.tensor(seeds, device=model.device),
                policy_version=torch.full_like(group, self.version),
                lengths=lengths,
            )
            yield RolloutChunk(batch=batch, samples=texts, prompts=prompts)
