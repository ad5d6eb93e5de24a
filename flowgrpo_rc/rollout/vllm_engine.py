"""Rollouts of text by vLLM (https://docs.vllm.ai), on the trainer's GPU in a process of its own."""

import os
import shutil
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from flowgrpo_rc.batch import TokenBatch, TokenSpec
from flowgrpo_rc.core.random import normal
from flowgrpo_rc.libraries import allocator_for_vllm
from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.models.lora_files import peft_files
from flowgrpo_rc.plugins import install_hint
from flowgrpo_rc.rollout.devices import VARIABLE, changed, visible_device
from flowgrpo_rc.rollout.engine import (
    EngineError,
    RolloutChunk,
    RolloutEngine,
    TextRequest,
)

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the only ones that vLLM makes room for
PROBE = [0, 1, 2, 3]  # tokens of any vocabulary


class VllmEngine(RolloutEngine[TextRequest]):
    """Samples from the checkpoint that the model was loaded from, beside it the trainer's LoRA.

    * vLLM schedules all samples of a request together, so chunks come after the last sample.
    * Each sample has its own seed, but the last bits of its logits depend on what else was in the
      batch. Rollouts are not reproducible bit for bit.
    * The log-probabilities are those of the distribution that was sampled from, after the
      temperature, in fp32 (`logprobs_mode=processed_logprobs`).
    * vLLM silently ignores an adapter for modules that it does not find. The constructor therefore
      checks that every kind of target module moves the log-probabilities.

    Args:
      model, network, dtype, chunk_size: as of `RolloutEngine`.
      gpu_memory_utilization: vLLM's share of the whole GPU, which the trainer uses as well.
      kv_cache_memory_bytes: size of the cache alone; None lets vLLM decide.
      tensor_parallel_size: GPUs of the engine; above 1 only for a trainer of one process.
      others: as in vLLM.
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
        import vllm

        self._vllm = vllm
        self._model = model
        self._dtype = dtype
        self._chunk_size = chunk_size
        lora = {name: p.detach() for name, p in network.named_parameters() if p.requires_grad}
        self._shapes = {name: tensor.shape for name, tensor in lora.items()}
        (config,) = network.peft_config.values()
        # vLLM's process takes the first GPU that it sees, unless it is to use several.
        alone = model.device.type == "cuda" and tensor_parallel_size == 1
        gpus = {VARIABLE: visible_device(model.device)} if alone else {}
        with changed(gpus | allocator_for_vllm(os.environ)):
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
                trust_remote_code=False,
            )
        self._adapter = VllmAdapter(self._llm.llm_engine, network.name_or_path, config)
        self._check_binding()
        self.sync_weights(lora, 0)

    @classmethod
    def check(
        cls,
        pipeline_class: str,
        absent: Sequence[str],
        device: torch.device,
        options: Mapping[str, Any],
    ) -> None:
        """Raises ImportError if vLLM is not installed."""
        if find_spec("vllm") is None:
            raise ImportError(f"vLLM is not installed: {install_hint('vllm')}")

    def generate(self, request: TextRequest) -> Iterator[RolloutChunk]:
        """Samples all responses at once, then yields them in chunks."""
        spec = request.spec
        limit = self._llm.model_config.max_model_len
        if spec.prompt_length + spec.response_length > limit:
            raise ValueError(
                f"rollout.prompt_length={spec.prompt_length}, "
                f"rollout.response_length={spec.response_length}: the model and "
                f"rollout.engine_kwargs.max_model_len allow {limit} tokens together"
            )
        chosen = request.rows()
        batch = self._rollout(request, chosen)
        for start in range(0, len(batch), self._chunk_size):
            chunk = batch.rows(start, start + self._chunk_size)
            prompts = [request.prompt_of(chosen[start + row]) for row in range(len(chunk))]
            texts = self._model.decode(chunk.response_ids, chunk.response_mask)
            yield RolloutChunk(batch=chunk, samples=texts, prompts=prompts)

    def take_weights(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the adapter."""
        self._adapter.load(state)

    def lora_shapes(self) -> Mapping[str, torch.Size]:
        """Returns the shapes of the LoRA that the engine was made for."""
        return self._shapes

    def held_weights(self) -> None:
        """Returns None: the weights are in vLLM's process."""

    def close(self) -> None:
        """Ends vLLM's process."""
        self._adapter.drop()
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm

    def _rollout(self, request: TextRequest, chosen: range) -> TokenBatch:
        spec = request.spec
        device = self._model.device
        said = [prompt.said for prompt in request.prompts.prompts]
        ids, mask = self._model.encode(said, max_length=spec.prompt_length)
        prompts = [row[valid].tolist() for row, valid in zip(ids, mask, strict=True)]
        rows = [row // request.samples_per_prompt for row in chosen]
        seeds = request.seeds[chosen.start : chosen.stop]
        params = [self._sampling_params(spec, seed) for seed in seeds]
        completions = self._complete([prompts[row] for row in rows], params)
        responses = [
            torch.tensor(completion.token_ids, dtype=torch.long) for completion in completions
        ]
        log_probs = [
            torch.tensor(completion.logprobs.logprobs).float() for completion in completions
        ]
        # At temperature 0 the likeliest token has probability 1; vLLM reports that at 1 instead.
        if spec.temperature == 0:
            log_probs = [torch.zeros_like(values) for values in log_probs]
        valid = [torch.ones_like(response, dtype=torch.bool) for response in responses]
        index = torch.tensor(rows, device=device)
        prompt_lengths = [len(prompts[row]) for row in rows]
        lengths = [prompt_lengths, [len(response) for response in responses]]
        return TokenBatch(
            # The echo says what vLLM used: it raises temperatures below 0.01. Nobody asks its own
            # process for TF32.
            spec=replace(spec, dtype=self._dtype, tf32=False, temperature=params[0].temperature),
            prompt_ids=ids[index],
            prompt_mask=mask[index],
            response_ids=pad_sequence(
                responses, batch_first=True, padding_value=self._model.pad_id
            ).to(device),
            response_mask=pad_sequence(valid, batch_first=True).to(device),
            rollout_log_probs=pad_sequence(log_probs, batch_first=True).to(device),
            group=torch.tensor(request.prompts.slots, device=device)[index],
            seed=torch.tensor(seeds, device=device),
            policy_version=torch.full_like(index, self.version),
            lengths=torch.tensor(lengths).T,
        )

    def _sampling_params(self, spec: TokenSpec, seed: int) -> Any:
        return self._vllm.SamplingParams(
            temperature=spec.temperature,
            top_p=1.0,
            top_k=0,
            seed=seed,
            max_tokens=spec.response_length,
            stop_token_ids=list(self._model.eos_ids),
            # The trainer's end tokens stand above; vLLM would read its own from the checkpoint.
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
        )

    def _complete(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        """Returns vLLM's CompletionOutput for each prompt, in order, under the present adapter."""
        requests = [self._vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(
            requests, params, use_tqdm=False, lora_request=self._adapter.request
        )
        return [output.outputs[0] for output in outputs]

    def _check_binding(self) -> None:
        """Raises ValueError if a LoRA on a kind of target module changes no log-prob."""
        base = self._probe()
        tensors_of: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, shape in self._shapes.items():
            kind = module_of(name).rpartition(".")[2]
            tensors_of[kind][name] = 0.1 * normal(shape, [0], name)[0]
        for kind, tensors in tensors_of.items():
            self._adapter.load(tensors)
            if self._probe() == base:
                raise ValueError(
                    f"model.target_modules: vLLM ignores a LoRA on {kind} of this model"
                )
        self._adapter.drop()

    def _probe(self) -> tuple[int, float]:
        """Returns the likeliest token after a fixed prompt, and its log-probability."""
        spec = TokenSpec(
            dtype=self._dtype, temperature=0.0, prompt_length=len(PROBE), response_length=1
        )
        (completion,) = self._complete([PROBE], [self._sampling_params(spec, 0)])
        return completion.token_ids[0], completion.logprobs.logprobs[0]


class VllmAdapter:
    """The one adapter of a vLLM engine: a folder in peft's layout, named by a `request`."""

    def __init__(self, engine: Any, base: str, config: Any) -> None:
        from vllm.lora.request import LoRARequest

        self.request: Any = None
        self._make_request = LoRARequest
        self._engine = engine
        self._base = base
        self._config = config
        self._count = 0

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Makes LoRA tensors, all or some, the adapter, in place of the former one."""
        self.drop()
        # A new adapter to vLLM each time: it caches weights by number and prefixes by name.
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
    """Returns the module that a LoRA tensor belongs to."""
    return key.split(".lora_")[0]


def max_lora_rank(rank: int) -> int:
    """Returns the smallest rank that vLLM makes room for and that holds `rank`."""
    fitting = [allowed for allowed in MAX_LORA_RANKS if allowed >= rank]
    if not fitting:
        raise ValueError(f"model.lora_rank={rank}: vLLM takes at most {MAX_LORA_RANKS[-1]}")
    return fitting[0]
