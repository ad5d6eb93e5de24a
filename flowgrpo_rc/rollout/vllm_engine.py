"""Rollouts of a language model by vLLM (https://docs.vllm.ai), on the trainer's GPU but in a
process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowgrpo_rc.batch import TokenBatch, TokenSpec
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.rollout.devices import visible_device
from flowgrpo_rc.rollout.engine import RolloutChunk, RolloutEngine, TextRequest
from flowgrpo_rc.rollout.vllm_lora import VllmAdapter, max_lora_rank, module_of

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PROBE = [0, 1, 2, 3]  # tokens of any vocabulary


class VllmEngine(RolloutEngine[TextRequest]):
    """Samples from the checkpoint that the model was loaded from, with the trainer's LoRA beside
    it.

    vLLM schedules all samples of a request together, so the chunks come once the last sample is
    done. Each sample is drawn with its own seed, but from logits whose last bits depend on what
    else was in the batch: rollouts are not reproducible bit for bit. The log-probabilities are
    those of the distribution that was sampled from, after the temperature, in fp32
    (`logprobs_mode=processed_logprobs`).

    Each `sync_weights` makes a new adapter, since vLLM keeps adapters by their number and prefixes
    by their name. An adapter for modules that vLLM does not find has no effect and raises nothing,
    so the constructor checks that every kind of target module moves the log-probabilities.

    The options are vLLM's own. gpu_memory_utilization is a fraction of the whole GPU, which the
    trainer shares; kv_cache_memory_bytes sets the cache alone. tensor_parallel_size above 1 is for
    a trainer of one process.
    """

    kind = "causal_lm"

    def __init__(
        self,
        model: CausalLM,
        network: Any,
        *,
        dtype: str,
        chunk_size: int,
        gpu_memory_utilization: float = 0.4,
        kv_cache_memory_bytes: int | None = None,
        tensor_parallel_size: int = 1,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        enforce_eager: bool = False,
        quantization: str | None = None,
    ) -> None:
        try:
            import vllm
        except ImportError as error:
            raise ImportError(
                "rollout.name=vllm_engine needs vLLM: pip install 'flowgrpo_rc[vllm]'"
            ) from error
        self._vllm = vllm
        self._model = model
        self._dtype = dtype
        self._chunk_size = chunk_size
        lora = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        self._shapes = {name: tensor.shape for name, tensor in lora.items()}
        ((name, config),) = network.peft_config.items()
        self._version = 0
        with _trainer_device_only(model.device, tensor_parallel_size):
            self._llm = vllm.LLM(
                model=network.name_or_path,
                dtype=DTYPES[dtype],
                quantization=quantization,
                tensor_parallel_size=tensor_parallel_size,
                gpu_memory_utilization=gpu_memory_utilization,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_prefix_caching=enable_prefix_caching,
                enforce_eager=enforce_eager,
                enable_lora=True,
                max_loras=1,
                max_lora_rank=max_lora_rank(config.r),
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
            )
        self._adapter = VllmAdapter(self._llm.llm_engine, network.name_or_path, name, config)
        self._check_binding()
        self.sync_weights(lora, 0)

    def generate(self, request: TextRequest) -> Iterator[RolloutChunk]:
        spec = request.spec
        limit = self._llm.model_config.max_model_len
        if spec.prompt_length + spec.response_length > limit:
            raise ValueError(
                f"rollout.prompt_length={spec.prompt_length}, "
                f"rollout.response_length={spec.response_length}: the "
                f"model and rollout.engine_kwargs.max_model_len allow {limit} tokens together"
            )
        batch = self._rollout(request)
        for start in range(0, len(batch), self._chunk_size):
            part = batch.rows(start, start + self._chunk_size)
            prompts = [request.prompt_of(start + row) for row in range(len(part))]
            texts = self._model.decode(part.response_ids, part.response_mask)
            yield RolloutChunk(
                batch=part, samples=texts, prompts=prompts, policy_version=self._version
            )

    def sync_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        shapes = {name: tensor.shape for name, tensor in state.items()}
        if shapes != self._shapes:
            different = sorted({name for name, _ in shapes.items() ^ self._shapes.items()})[:3]
            raise ValueError(
                f"the engine's LoRA has other tensors than the trainer's, among them {different}"
            )
        self._adapter.load(state)
        self._version = version

    def held_weights(self) -> None:
        return None

    def close(self) -> None:
        self._adapter.drop()
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _rollout(self, request: TextRequest) -> TokenBatch:
        spec = request.spec
        device = self._model.device
        texts = [prompt.text for prompt in request.prompts.prompts]
        ids, mask = self._model.encode(texts, max_length=spec.prompt_length)
        prompts = [row[valid].tolist() for row, valid in zip(ids, mask, strict=True)]
        rows = [row // request.samples_per_prompt for row in range(len(request.seeds))]
        params = [self._sampling_params(spec, seed) for seed in request.seeds]
        completions = self._complete([prompts[row] for row in rows], params)
        responses = [
            torch.tensor(completion.token_ids, dtype=torch.long) for completion in completions
        ]
        log_probs = [
            torch.tensor(completion.logprobs.logprobs, dtype=torch.float32)
            for completion in completions
        ]
        if spec.temperature == 0:  # vLLM gives those at temperature 1
            log_probs = [torch.zeros_like(values) for values in log_probs]
        valid = [torch.ones_like(response, dtype=torch.bool) for response in responses]
        index = torch.tensor(rows, device=device)
        return TokenBatch(
            # The echo says what vLLM used: it raises temperatures below 0.01.
            spec=replace(spec, dtype=self._dtype, temperature=params[0].temperature),
            prompt_ids=ids[index],
            prompt_mask=mask[index],
            response_ids=pad_sequence(
                responses, batch_first=True, padding_value=self._model.pad_id
            ).to(device),
            response_mask=pad_sequence(valid, batch_first=True).to(device),
            rollout_log_probs=pad_sequence(log_probs, batch_first=True).to(device),
            group=torch.tensor(request.prompts.slots, device=device)[index],
            seed=torch.tensor(request.seeds, device=device),
            policy_version=torch.full_like(index, self._version),
        )

    def _sampling_params(self, spec: TokenSpec, seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=spec.temperature,
            top_p=1.0,
            top_k=0,
            seed=seed,
            max_tokens=spec.response_length,
            stop_token_ids=list(self._model.eos_ids),
            ignore_eos=True,  # vLLM's own reading of the checkpoint; the line above has the trainer's
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
        )

    def _complete(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        """vLLM's CompletionOutput for each prompt, in order; under the present adapter."""
        requests = [self._vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(
            requests, params, use_tqdm=False, lora_request=self._adapter.request
        )
        return [output.outputs[0] for output in outputs]

    def _check_binding(self) -> None:
        """ValueError if vLLM ignores a kind of target module: random weights there must move the
        log-probabilities.
        """
        base = self._probe()
        for kind in sorted({module_of(name).rpartition(".")[2] for name in self._shapes}):
            names = [name for name in self._shapes if module_of(name).rpartition(".")[2] == kind]
            self._adapter.load(
                {name: 0.1 * normal(self._shapes[name], [0], name)[0] for name in names}
            )
            if self._probe() == base:
                raise ValueError(
                    f"model.target_modules: vLLM ignores a LoRA on {kind} of this model"
                )
        self._adapter.drop()

    def _probe(self) -> tuple[int, float]:
        """The likeliest token after a fixed prompt, and its log-probability."""
        spec = TokenSpec(
            dtype=self._dtype, temperature=0.0, prompt_length=len(PROBE), response_length=1
        )
        (completion,) = self._complete([PROBE], [self._sampling_params(spec, 0)])
        return completion.token_ids[0], completion.logprobs.logprobs[0]


@contextmanager
def _trainer_device_only(device: torch.device, tensor_parallel_size: int) -> Iterator[None]:
    """vLLM's process takes the first GPU that it sees. Unless it is to use several, that must be
    the trainer's.
    """
    if device.type != "cuda" or tensor_parallel_size > 1:
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(device)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
