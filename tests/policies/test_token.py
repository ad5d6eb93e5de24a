"""Language models: padding, the policy, the engine, its precision, and the LoRA files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from support.text_rollouts import SPEC, TEXTS, lora_state, perturb, sample_texts, text_request
from support.tiny_language_model import EOS, PAD, save_language_model
from transformers import AutoModelForCausalLM, GenerationConfig

from flowgrpo_rc.batch import Prompt, PromptBatch, TokenBatch
from flowgrpo_rc.core.random import uniform
from flowgrpo_rc.core.tokens import until_end
from flowgrpo_rc.export.lora import export_lora
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.causal_lm import CausalLM, load_causal_lm
from flowgrpo_rc.models.lora import add_lora, lora_parameters, reference_policy
from flowgrpo_rc.models.lora_files import EXPORT_NAMES
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.report.sections import samples as report_samples
from flowgrpo_rc.rollout.config import EvaluationConfig, RolloutConfig
from flowgrpo_rc.rollout.engine import TextRequest
from flowgrpo_rc.rollout.replica import Replica
from flowgrpo_rc.rollout.transformers_engine import TransformersEngine
from flowgrpo_rc.training.tasks.text import TextTask

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm") / "tiny"
    save_language_model(folder)
    return folder


@pytest.fixture
def config(tiny_lm: Path) -> ModelConfig:
    return ModelConfig(kind="causal_lm", path=str(tiny_lm), lora_rank=4, lora_alpha=6)


@pytest.fixture
def model(config: ModelConfig) -> CausalLM:
    return load_causal_lm(config, CPU)


@pytest.fixture
def trained(model: CausalLM, config: ModelConfig) -> CausalLM:
    """With a LoRA whose B is not zero, so that it takes part."""
    perturb(add_lora(model, config, seed=0))
    return model


def padded(batch: TokenBatch, left: int, right: int) -> TokenBatch:
    """More padding, with ids that would show if they were read."""
    pad = torch.nn.functional.pad
    return batch.replace(
        prompt_ids=pad(batch.prompt_ids, (left, 0), value=7),
        prompt_mask=pad(batch.prompt_mask, (left, 0)),
        response_ids=pad(batch.response_ids, (0, right), value=9),
        response_mask=pad(batch.response_mask, (0, right)),
        rollout_log_probs=pad(batch.rollout_log_probs, (0, right)),
    )


# --- The model


def test_encode_pads_left_and_never_cuts(model: CausalLM) -> None:
    ids, mask = model.encode(["1+2=", "37+58="], max_length=6)
    assert mask.tolist() == [[False] * 2 + [True] * 4, [True] * 6]
    assert ids[0, :2].tolist() == [PAD, PAD]
    assert model.decode(ids, mask) == ["1+2=", "37+58="]
    with pytest.raises(
        ValueError, match=r"rollout\.prompt_length=5, but the prompt '37\+58=' has 6 tokens"
    ):
        model.encode(["1+2=", "37+58="], max_length=5)
    with pytest.raises(ValueError, match="the prompt '' has no token"):
        model.encode([""], max_length=5)


def test_end_and_pad_tokens(model: CausalLM, tiny_lm: Path) -> None:
    assert model.eos_ids == (14, EOS)  # those of generation_config.json first, then the tokenizer's
    assert model.pad_id == PAD
    model.tokenizer.pad_token = None
    again = CausalLM(model.network, model.tokenizer, CPU)
    assert again.pad_id == 14
    model.tokenizer.eos_token = None
    model.network.generation_config = GenerationConfig()
    with pytest.raises(ValueError, match="names an end-of-sequence token"):
        CausalLM(model.network, model.tokenizer, CPU)


def test_decode_drops_ends_and_what_the_mask_leaves_out(model: CausalLM) -> None:
    ids = torch.tensor([[2, 3, EOS, 9], [14, 5, 5, 5]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert model.decode(ids, mask) == ["01", ""]


def test_a_folder_that_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"model\.path=.*cannot be read as a causal language model"
    ):
        load_causal_lm(ModelConfig(kind="causal_lm", path=str(tmp_path)), CPU)


# --- The policy


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-6)])
def test_log_probs_do_not_depend_on_padding(
    trained: CausalLM, dtype: torch.dtype, tolerance: float
) -> None:
    """In fp64 what is left is the rounding of the logits to fp32; their size is about 10."""
    batch, _ = sample_texts(trained)
    trained.network.to(dtype)
    policy = TokenPolicy(trained, trained.network)
    wanted = policy.log_probs(batch, len(batch))
    assert len(set(batch.prompt_mask.sum(1).tolist())) == 3
    assert len(set(batch.response_mask.sum(1).tolist())) > 2
    assert wanted[~batch.response_mask].abs().max() == 0
    for left, right in ((5, 0), (0, 4), (3, 2)):
        found = policy.log_probs(padded(batch, left, right), len(batch))
        torch.testing.assert_close(found[:, : batch.num_steps], wanted, atol=tolerance, rtol=0)
        assert (found[:, batch.num_steps :] == 0).all()
    # One row at a time, cut to its own tokens: nothing of the other rows is in a row's log-probs.
    for row in range(len(batch)):
        alone = batch.rows(row, row + 1)
        prompt, response = int(alone.prompt_mask.sum()), int(alone.response_mask.sum())
        alone = alone.replace(
            prompt_ids=alone.prompt_ids[:, -prompt:],
            prompt_mask=alone.prompt_mask[:, -prompt:],
            response_ids=alone.response_ids[:, :response],
            response_mask=alone.response_mask[:, :response],
            rollout_log_probs=None,
        )
        found = policy.evaluate(alone).log_probs
        torch.testing.assert_close(found[0], wanted[row, :response], atol=tolerance, rtol=0)


def test_evaluation_is_the_stock_models_log_softmax(trained: CausalLM) -> None:
    """Against a forward without any padding, mask or position ids."""
    spec = replace(SPEC, temperature=0.7)
    batch, _ = sample_texts(trained, spec)
    found = TokenPolicy(trained, trained.network).log_probs(batch, 5)
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row]]
        response = batch.response_ids[row][batch.response_mask[row]]
        with torch.no_grad():
            logits = trained.network(torch.cat([prompt, response])[None]).logits[
                0, len(prompt) - 1 : -1
            ]
        wanted = (logits.double() / 0.7).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(found[row, : len(response)].double(), wanted, atol=1e-5, rtol=0)


def test_an_empty_response_is_finite_and_has_no_gradient(trained: CausalLM) -> None:
    batch, _ = sample_texts(trained)
    mask = batch.response_mask.clone()
    mask[0] = False
    batch = batch.replace(response_mask=mask)
    evaluation = TokenPolicy(trained, trained.network).evaluate(padded(batch, 4, 3))
    assert torch.isfinite(evaluation.log_probs).all()
    evaluation.log_probs[0].sum().backward(retain_graph=True)
    gradients = [p.grad for p in lora_parameters(trained.network).values()]
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    evaluation.log_probs.sum().backward()
    assert all(
        torch.isfinite(gradient).all() and gradient.abs().max() > 0 for gradient in gradients
    )


def test_kl_is_zero_at_the_start_and_moves_the_lora_alone(
    model: CausalLM, config: ModelConfig
) -> None:
    network = add_lora(model, config, seed=0)
    batch, _ = sample_texts(model)
    policy = TokenPolicy(model, network)
    with torch.no_grad(), reference_policy(network):
        reference = policy.evaluate(batch)
    assert policy.divergence(policy.evaluate(batch), reference, batch).abs().max() == 0
    perturb(network)
    now = policy.evaluate(batch)
    kl = policy.divergence(now, reference, batch)
    log_ratio = (reference.log_probs - now.log_probs).double()
    torch.testing.assert_close(kl.double(), log_ratio.exp() - 1 - log_ratio, atol=1e-6, rtol=1e-5)
    assert kl[batch.response_mask].max() > 0
    assert (kl[~batch.response_mask] == 0).all()
    kl.sum().backward()
    moved = {name for name, p in network.named_parameters() if p.grad is not None}
    assert moved == set(lora_parameters(network))


def test_with_the_adapter_off_it_is_the_base_bit_for_bit(
    trained: CausalLM, config: ModelConfig
) -> None:
    batch, _ = sample_texts(trained)
    base = load_causal_lm(config, CPU)
    wanted = TokenPolicy(base, base.network).log_probs(batch, 4)
    policy = TokenPolicy(trained, trained.network)
    with reference_policy(trained.network):
        assert torch.equal(policy.log_probs(batch, 4), wanted)
    assert not torch.equal(policy.log_probs(batch, 4), wanted)


def test_gradient_checkpointing_changes_no_bit_and_leaves_generation_alone(
    trained: CausalLM,
) -> None:
    batch, _ = sample_texts(trained)
    gradients = []
    for checkpointed in (False, True):
        policy = TokenPolicy(trained, trained.network, checkpoint_gradients=checkpointed)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            log_probs = policy.evaluate(batch).log_probs
        log_probs.sum().backward()
        gradients.append(
            (len(saved), {n: p.grad.clone() for n, p in lora_parameters(trained.network).items()})
        )
        trained.network.zero_grad()
        ids, mask = trained.encode(TEXTS, max_length=8)
        again = policy.rollout(
            ids, mask, SPEC, uniform((SPEC.response_length,), [100, 104, 108], "tokens")
        )
        assert torch.equal(
            again.ids[:, : batch.num_steps], batch.response_ids[::4][:, : again.ids.shape[1]]
        )
    (all_saved, plain), (few_saved, checkpointed_gradients) = gradients
    assert few_saved < all_saved
    assert all(torch.equal(plain[name], checkpointed_gradients[name]) for name in plain)


# --- The engine


def test_batch_holds_what_was_sampled(trained: CausalLM) -> None:
    spec = replace(SPEC, dtype="bf16", response_length=5)
    batch, chunks = sample_texts(trained, spec)
    assert batch.spec == spec
    assert batch.group.tolist() == [5] * 4 + [6] * 4 + [7] * 4
    assert batch.seed.tolist() == list(range(100, 112))
    assert batch.policy_version.tolist() == [3] * 12
    assert [prompt.index for chunk in chunks for prompt in chunk.prompts] == [0] * 4 + [1] * 4 + [
        2
    ] * 4
    assert trained.decode(batch.prompt_ids[::4], batch.prompt_mask[::4]) == list(TEXTS)
    texts = [text for chunk in chunks for text in chunk.samples]
    assert texts == trained.decode(batch.response_ids, batch.response_mask)
    assert batch.rollout_log_probs.dtype == torch.float32
    assert (batch.rollout_log_probs[~batch.response_mask] == 0).all()
    assert (batch.rollout_log_probs[batch.response_mask] < 0).all()


def test_responses_end_with_an_end_token_or_at_the_limit(trained: CausalLM) -> None:
    batch, chunks = sample_texts(trained, n=40, chunk=120)
    texts = chunks[0].samples
    lengths = batch.response_mask.sum(1)
    seen = {"empty": 0, "ended": 0, "limit": 0}
    for row in range(len(batch)):
        tokens = batch.response_ids[row, : lengths[row]].tolist()
        assert batch.response_mask[row, : lengths[row]].all()
        ended = tokens[-1] in trained.eos_ids
        assert not set(tokens[:-1]) & set(trained.eos_ids)
        assert ended or len(tokens) == SPEC.response_length
        assert "<" not in texts[row]
        seen["limit"] += not ended
        seen["ended"] += ended
        seen["empty"] += ended and texts[row] == "" and len(tokens) == 1
    assert min(seen.values()) > 0, seen
    assert 3 in batch.response_ids[batch.response_mask], (
        "suppress_tokens of the checkpoint has no effect"
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_do_not_depend_on_the_chunk(trained: CausalLM, temperature: float) -> None:
    spec = replace(SPEC, temperature=temperature)
    together, _ = sample_texts(trained, spec, chunk=12)
    for chunk in (1, 3, 5):
        found, _ = sample_texts(trained, spec, chunk=chunk)
        assert torch.equal(found.response_mask, together.response_mask)
        kept = found.response_mask
        assert torch.equal(found.response_ids[kept], together.response_ids[kept])
        torch.testing.assert_close(
            found.rollout_log_probs, together.rollout_log_probs, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_recorded_log_probs_are_the_policys(trained: CausalLM, temperature: float) -> None:
    batch, _ = sample_texts(trained, replace(SPEC, temperature=temperature))
    policy = TokenPolicy(trained, trained.network)
    difference = (policy.log_probs(batch, 5) - batch.rollout_log_probs).abs()
    assert difference.max() < 1e-5
    elsewhere = policy.log_probs(
        batch.replace(spec=replace(SPEC, temperature=temperature + 0.2)), 5
    )
    assert (elsewhere - batch.rollout_log_probs).abs().max() > 0.01


def test_bf16_rollout_has_a_small_mismatch(trained: CausalLM) -> None:
    batch, _ = sample_texts(trained, replace(SPEC, dtype="bf16"), n=20, chunk=20)
    difference = (
        TokenPolicy(trained, trained.network).log_probs(batch, 5) - batch.rollout_log_probs
    ).abs()
    assert 1e-4 < difference[batch.response_mask].mean() < 0.1


def test_first_tokens_have_the_policys_frequencies(trained: CausalLM) -> None:
    """1000 responses to one prompt; chi-squared with 14 degrees of freedom exceeds 36 once in a
    thousand times.
    """
    engine = TransformersEngine(trained, trained.network, dtype="fp32", chunk_size=1000)
    spec = replace(SPEC, temperature=1.5, response_length=1)
    batch = next(engine.generate(text_request(spec, texts=["37+58="], n=1000))).batch
    ids, mask = trained.encode(["37+58="], max_length=8)
    with torch.no_grad():
        logits = trained.network(ids, attention_mask=mask.long()).logits[0, -1]
    wanted = 1000 * (logits.double() / 1.5).softmax(-1)
    found = torch.bincount(batch.response_ids[:, 0], minlength=len(wanted)).double()
    assert (((found - wanted) ** 2) / wanted).sum() < 36


def test_sync_weights_changes_the_samples_and_refuses_other_tensors(trained: CausalLM) -> None:
    engine = TransformersEngine(trained, trained.network, dtype="fp32", chunk_size=12)
    before = next(engine.generate(text_request(SPEC))).batch
    new = {
        name: tensor * (-3 if "lora_B" in name else 1)
        for name, tensor in lora_state(trained.network).items()
    }
    engine.sync_weights(new, version=8)
    after = next(engine.generate(text_request(SPEC))).batch
    assert after.policy_version.unique().tolist() == [8]
    assert before.rollout_log_probs[:, 0].tolist() != after.rollout_log_probs[:, 0].tolist()
    name = next(iter(new))
    with pytest.raises(ValueError, match="other tensors than the trainer's"):
        engine.sync_weights({other: new[other] for other in new if other != name}, version=9)
    with pytest.raises(ValueError, match=r"the engine's .* is \(4, 64\), the trainer's \(1, 64\)"):
        engine.sync_weights(new | {name: new[name][:1]}, version=9)
    engine.close()


def test_a_copy_in_bf16_keeps_the_rotary_frequencies(trained: CausalLM) -> None:
    copy = Replica(trained.network, "bf16").network
    buffers = dict(copy.named_buffers())
    assert {tensor.dtype for tensor in copy.parameters()} == {torch.bfloat16}
    for name, tensor in trained.network.named_buffers():
        assert buffers[name].dtype == torch.float32
        assert torch.equal(buffers[name], tensor)
    shared = Replica(trained.network, "fp32").network
    ours, theirs = dict(trained.network.named_parameters()), dict(shared.named_parameters())
    assert all((ours[n].data_ptr() == theirs[n].data_ptr()) == ("lora_" not in n) for n in ours)


def test_a_long_prompt_is_refused_while_sampling(trained: CausalLM) -> None:
    engine = TransformersEngine(trained, trained.network, dtype="fp32", chunk_size=12)
    with pytest.raises(ValueError, match=r"rollout\.prompt_length=5"):
        next(engine.generate(text_request(replace(SPEC, prompt_length=5))))


# --- The task


def task(model: CausalLM, **held_out: object) -> TextTask:
    config = RolloutConfig(
        name="transformers_engine",
        n=2,
        dtype="fp32",
        prompt_length=8,
        response_length=6,
        val_kwargs=EvaluationConfig(**held_out),  # type: ignore[arg-type]
    )
    return TextTask(model, TokenPolicy(model, model.network), config)


def test_evaluation_is_greedy_by_default(trained: CausalLM) -> None:
    prompts = [Prompt(text=text, index=i) for i, text in enumerate(TEXTS)]
    ids, mask = trained.encode(TEXTS, max_length=8)
    stock = trained.network.generate(
        ids,
        attention_mask=mask.long(),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=6, pad_token_id=PAD, eos_token_id=list(trained.eos_ids)
        ),
    )[:, ids.shape[1] :]
    wanted = trained.decode(stock, until_end(stock, torch.tensor(trained.eos_ids)))
    assert task(trained).sample(prompts).samples == wanted
    assert task(trained).sample(prompts[::-1]).samples == wanted[::-1]


def test_evaluation_at_a_temperature_depends_on_seed_and_index_alone(trained: CausalLM) -> None:
    prompts = [Prompt(text="1+2=", index=i) for i in range(12)]
    warm = task(trained, temperature=1.5, seed=1)
    together = warm.sample(prompts).samples
    assert len(set(together)) > 1
    assert together == [text for prompt in prompts for text in warm.sample([prompt]).samples]
    assert together != task(trained, temperature=1.5, seed=2).sample(prompts).samples


def test_what_is_observed(trained: CausalLM) -> None:
    ids = torch.tensor([[2, 3, EOS, 0], [EOS, 0, 0, 0], [2, 2, 2, 2], [2, 2, 2, 14], [2, 2, 2, 2]])
    batch = TokenBatch(
        spec=replace(SPEC, response_length=4),
        prompt_ids=torch.ones(5, 1, dtype=torch.int64),
        prompt_mask=torch.ones(5, 1, dtype=torch.bool),
        response_ids=ids,
        response_mask=until_end(ids, torch.tensor(trained.eos_ids)),
        group=torch.zeros(5, dtype=torch.int64),
        seed=torch.arange(5),
        policy_version=torch.zeros(5, dtype=torch.int64),
    )
    assert task(trained).observe(batch).compute() == {
        "response/length_mean": 16 / 5,
        "response/length_max": 4.0,
        "response/length_min": 1.0,
        "response/limit_fraction": 2 / 5,
        "response/empty_fraction": 1 / 5,
    }


def test_the_request_has_the_configured_spec(trained: CausalLM) -> None:
    prompts = PromptBatch(step=1, prompts=[Prompt(text="1+2=", index=0)], slots=[4])
    made = task(trained).request(prompts, [7, 8])
    assert made == TextRequest(prompts=prompts, samples_per_prompt=2, spec=SPEC, seeds=[7, 8])


def test_saved_samples_and_their_report(trained: CausalLM, tmp_path: Path) -> None:
    prompts = [Prompt(text="1+<b>=", index=0, target="3"), Prompt(text="2+2=", index=1)]
    stem = tmp_path / "samples" / "step_000000"
    assert (
        task(trained).save_samples(stem, ["3\u2028", "</td>"], prompts, [1.0, float("nan")]) is None
    )
    rows = [json.loads(line) for line in stem.with_suffix(".jsonl").read_text().split("\n") if line]
    assert rows == [
        {"prompt": "1+<b>=", "target": "3", "completion": "3\u2028", "score": 1.0},
        {"prompt": "2+2=", "target": None, "completion": "</td>", "score": None},
    ]
    only = report_samples(tmp_path)
    assert only.count("Step 0") == 1
    assert "1+&lt;b&gt;=" in only
    assert "&lt;/td&gt;" in only
    assert "failed" in only
    for step, text in ((10, "middle"), (20, "last")):
        task(trained).save_samples(
            stem.with_name(f"step_{step:06d}"), [text, "4"], prompts, [0.25, 0.0]
        )
    both = report_samples(tmp_path)
    assert "Step 20" in both
    assert "last" in both
    assert "0.25" in both
    assert "middle" not in both


# --- LoRA files


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks for it
@pytest.mark.parametrize("targets", [None, ["q_proj", "layers.1.mlp.up_proj"]])
def test_stock_peft_gives_the_trained_log_probs_bit_for_bit(
    tiny_lm: Path, tmp_path: Path, targets: list[str] | None
) -> None:
    config = ModelConfig(
        kind="causal_lm",
        path=str(tiny_lm),
        lora_rank=4,
        lora_alpha=6,
        target_modules=targets,
        lora_init="default",
    )
    model = load_causal_lm(config, CPU)
    perturb(add_lora(model, config, seed=0))
    batch, _ = sample_texts(model)
    wanted = TokenPolicy(model, model.network).log_probs(batch, 12)
    exported = export_lora(lora_state(model.network), config, tmp_path / "lora")
    assert exported == tmp_path / "lora" / EXPORT_NAMES["causal_lm"]
    assert sorted(path.name for path in exported.parent.iterdir()) == [
        "adapter_config.json",
        exported.name,
    ]
    stock = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_lm), exported.parent
    )
    assert torch.equal(TokenPolicy(model, stock).log_probs(batch, 12), wanted)
    stock.set_adapter("default")
    with stock.disable_adapter():
        assert not torch.equal(TokenPolicy(model, stock).log_probs(batch, 12), wanted)


def test_training_goes_on_from_an_exported_lora(
    trained: CausalLM, config: ModelConfig, tmp_path: Path
) -> None:
    exported = export_lora(lora_state(trained.network), config, tmp_path)
    same = replace(config, lora_path=str(tmp_path))
    found = lora_state(add_lora(load_causal_lm(same, CPU), same, seed=9))
    assert all(
        torch.equal(found[name], tensor) for name, tensor in lora_state(trained.network).items()
    )
    stronger = replace(config, lora_alpha=12, lora_path=str(exported))
    found = lora_state(add_lora(load_causal_lm(stronger, CPU), stronger, seed=9))
    for name, tensor in lora_state(trained.network).items():
        assert torch.equal(found[name], tensor * (0.5 if "lora_B" in name else 1.0))
    wide = replace(same, lora_rank=8)
    with pytest.raises(ValueError, match=r"model\.lora_rank=8"):
        add_lora(load_causal_lm(wide, CPU), wide, seed=0)
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(described | {"use_rslora": True}))
    with pytest.raises(ValueError, match=r"sets use_rslora; only a plain LoRA"):
        add_lora(load_causal_lm(same, CPU), same, seed=0)
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"no adapter_config\.json beside adapter_model"):
        add_lora(load_causal_lm(same, CPU), same, seed=0)
    exported.unlink()
    with pytest.raises(ValueError, match=r"there is no adapter_model\.safetensors"):
        add_lora(load_causal_lm(same, CPU), same, seed=0)
