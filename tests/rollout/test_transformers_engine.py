"""The transformers engine: what a batch holds, frequencies of tokens, precision, new weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.text_rollouts import SPEC, TEXTS, lora_state, sample_texts, text_request

from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.rollout.transformers_engine import TransformersEngine


def test_batch_holds_what_was_sampled(trained_lm: CausalLM) -> None:
    spec = replace(SPEC, dtype="bf16", response_length=5)
    batch, chunks = sample_texts(trained_lm, spec)
    assert batch.spec == spec
    assert batch.group.tolist() == [5] * 4 + [6] * 4 + [7] * 4
    assert batch.seed.tolist() == list(range(100, 112))
    assert batch.policy_version.tolist() == [3] * 12
    assert [prompt.index for chunk in chunks for prompt in chunk.prompts] == [0] * 4 + [1] * 4 + [
        2
    ] * 4
    assert trained_lm.decode(batch.prompt_ids[::4], batch.prompt_mask[::4]) == list(TEXTS)
    texts = [text for chunk in chunks for text in chunk.samples]
    assert texts == trained_lm.decode(batch.response_ids, batch.response_mask)
    assert batch.rollout_log_probs.dtype == torch.float32
    assert (batch.rollout_log_probs[~batch.response_mask] == 0).all()
    assert (batch.rollout_log_probs[batch.response_mask] < 0).all()


def test_responses_end_with_an_end_token_or_at_the_limit(trained_lm: CausalLM) -> None:
    batch, chunks = sample_texts(trained_lm, n=40, chunk=120)
    texts = chunks[0].samples
    lengths = batch.response_mask.sum(1)
    seen = {"empty": 0, "ended": 0, "limit": 0}
    for row in range(len(batch)):
        tokens = batch.response_ids[row, : lengths[row]].tolist()
        assert batch.response_mask[row, : lengths[row]].all()
        ended = tokens[-1] in trained_lm.eos_ids
        assert not set(tokens[:-1]) & set(trained_lm.eos_ids)
        assert ended or len(tokens) == SPEC.response_length
        assert "<" not in texts[row]
        seen["limit"] += not ended
        seen["ended"] += ended
        seen["empty"] += ended and texts[row] == "" and len(tokens) == 1
    assert min(seen.values()) > 0, seen
    assert 3 in batch.response_ids[batch.response_mask], (
        "suppress_tokens of the checkpoint has no effect"
    )


@pytest.mark.kernels
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_samples_do_not_depend_on_the_chunk(trained_lm: CausalLM, temperature: float) -> None:
    spec = replace(SPEC, temperature=temperature)
    together, _ = sample_texts(trained_lm, spec, chunk=12)
    for chunk in (1, 3, 5):
        found, _ = sample_texts(trained_lm, spec, chunk=chunk)
        assert torch.equal(found.response_mask, together.response_mask)
        kept = found.response_mask
        assert torch.equal(found.response_ids[kept], together.response_ids[kept])
        torch.testing.assert_close(
            found.rollout_log_probs, together.rollout_log_probs, atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_recorded_log_probs_are_the_policys(trained_lm: CausalLM, temperature: float) -> None:
    batch, _ = sample_texts(trained_lm, replace(SPEC, temperature=temperature))
    policy = TokenPolicy(trained_lm, trained_lm.network)
    difference = (policy.log_probs(batch, 5) - batch.rollout_log_probs).abs()
    assert difference.max() < 1e-5
    elsewhere = policy.log_probs(
        batch.replace(spec=replace(SPEC, temperature=temperature + 0.2)), 5
    )
    assert (elsewhere - batch.rollout_log_probs).abs().max() > 0.01


def test_sync_weights_changes_the_samples_and_refuses_other_tensors(trained_lm: CausalLM) -> None:
    engine = TransformersEngine(trained_lm, trained_lm.network, dtype="fp32", chunk_size=12)
    before = next(engine.generate(text_request(SPEC))).batch
    new = {
        name: tensor * (-3 if "lora_B" in name else 1)
        for name, tensor in lora_state(trained_lm.network).items()
    }
    engine.sync_weights(new, version=8)
    after = next(engine.generate(text_request(SPEC))).batch
    assert after.policy_version.unique().tolist() == [8]
    assert before.rollout_log_probs[:, 0].tolist() != after.rollout_log_probs[:, 0].tolist()
    name = next(iter(new))
    with pytest.raises(ValueError, match="other tensors than the trainer's"):
        engine.sync_weights({other: new[other] for other in new if other != name}, version=9)
    with pytest.raises(ValueError, match=r"\[4, 64\]\), not .*\[1, 64\]"):
        engine.sync_weights(new | {name: new[name][:1]}, version=9)
    engine.close()
