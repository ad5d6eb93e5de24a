"""The policy of a language model: log-probs, padding, the reference KL, gradient checkpointing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.text_rollouts import SPEC, TEXTS, perturb, sample_texts

from flowgrpo_rc.batch import TokenBatch
from flowgrpo_rc.core.random import uniform
from flowgrpo_rc.core.tokens import sample_tokens
from flowgrpo_rc.models.base import ModelConfig
from flowgrpo_rc.models.causal_lm import CausalLM, load_causal_lm
from flowgrpo_rc.models.lora import add_lora, lora_parameters, reference_policy
from flowgrpo_rc.policies.token import TokenPolicy


def padded(batch: TokenBatch, left: int, right: int) -> TokenBatch:
    """Returns the batch with more padding, whose ids would show if they were read."""
    pad = torch.nn.functional.pad
    return batch.replace(
        prompt_ids=pad(batch.prompt_ids, (left, 0), value=7),
        prompt_mask=pad(batch.prompt_mask, (left, 0)),
        response_ids=pad(batch.response_ids, (0, right), value=9),
        response_mask=pad(batch.response_mask, (0, right)),
        rollout_log_probs=pad(batch.rollout_log_probs, (0, right)),
    )


def test_rows_of_like_length_share_forwards_where_a_fifth_is_padding(trained_lm: CausalLM) -> None:
    batch, _ = sample_texts(trained_lm)
    batch = padded(batch, 30, 20)
    policy = TokenPolicy(trained_lm, trained_lm.network)
    order = policy.order(batch, 6)
    assert order is not None
    lengths = batch.prompt_mask.sum(1) + batch.response_mask.sum(1)
    for start in range(0, len(batch), 6):
        rows = order[start : start + 6]
        assert sorted(rows.tolist()) == list(range(start, min(start + 6, len(batch))))
        assert lengths[rows].tolist() == sorted(lengths[rows].tolist())
    seen = []
    hook = trained_lm.network.register_forward_pre_hook(
        lambda module, args, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    sorted_batch = batch.select(order)
    found = policy.log_probs(sorted_batch, 2)
    hook.remove()
    most = [
        int(
            sorted_batch.prompt_mask[rows].sum(1).max()
            + sorted_batch.response_mask[rows].sum(1).max()
        )
        for rows in torch.arange(len(batch)).split(2)
    ]
    assert seen == [width - 1 for width in most]  # nothing follows the last token
    torch.testing.assert_close(found, policy.log_probs(batch, 6)[order], atol=5e-6, rtol=0)
    full = batch.replace(
        prompt_mask=torch.ones_like(batch.prompt_mask),
        response_mask=torch.ones_like(batch.response_mask),
        lengths=None,
    )
    assert policy.order(full, 6) is None


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-6)])
def test_log_probs_do_not_depend_on_padding(
    trained_lm: CausalLM, dtype: torch.dtype, tolerance: float
) -> None:
    """The tolerance in fp64 is the rounding of the logits to fp32; their size is about 10."""
    batch, _ = sample_texts(trained_lm)
    trained_lm.network.to(dtype)
    policy = TokenPolicy(trained_lm, trained_lm.network)
    wanted = policy.log_probs(batch, len(batch))
    assert len(set(batch.prompt_mask.sum(1).tolist())) == 3
    assert len(set(batch.response_mask.sum(1).tolist())) > 2
    assert wanted[~batch.response_mask].abs().max() == 0
    for left, right in ((5, 0), (0, 4), (3, 2)):
        found = policy.log_probs(padded(batch, left, right), len(batch))
        torch.testing.assert_close(found[:, : batch.num_steps], wanted, atol=tolerance, rtol=0)
        assert (found[:, batch.num_steps :] == 0).all()


def test_evaluation_is_the_stock_models_log_softmax(trained_lm: CausalLM) -> None:
    """The stock model gets no padding, mask or position ids."""
    spec = replace(SPEC, temperature=0.7)
    batch, _ = sample_texts(trained_lm, spec)
    found = TokenPolicy(trained_lm, trained_lm.network).log_probs(batch, 5)
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row]]
        response = batch.response_ids[row][batch.response_mask[row]]
        with torch.no_grad():
            logits = trained_lm.network(torch.cat([prompt, response])[None]).logits[
                0, len(prompt) - 1 : -1
            ]
        wanted = (logits.double() / 0.7).log_softmax(-1).gather(-1, response[:, None])[:, 0]
        torch.testing.assert_close(found[row, : len(response)].double(), wanted, atol=1e-5, rtol=0)


def test_each_token_is_drawn_with_its_own_number(trained_lm: CausalLM) -> None:
    ids, mask = trained_lm.encode(TEXTS, max_length=8)
    uniforms = uniform((SPEC.response_length,), [1, 2, 3], "tokens")
    found = TokenPolicy(trained_lm, trained_lm.network).rollout(ids, mask, SPEC, uniforms)
    for row, numbers in enumerate(uniforms):
        prompt = ids[row][mask[row]]
        response = found.ids[row][found.mask[row]]
        with torch.no_grad():
            logits = trained_lm.network(torch.cat([prompt, response])[None]).logits
        logits = logits[0, len(prompt) - 1 : -1]
        drawn = sample_tokens(logits, numbers[: len(response)], SPEC.temperature)
        assert torch.equal(drawn, response)


def test_an_empty_response_is_finite_and_has_no_gradient(trained_lm: CausalLM) -> None:
    batch, _ = sample_texts(trained_lm)
    mask = batch.response_mask.clone()
    mask[0] = False
    batch = batch.replace(response_mask=mask)
    evaluation = TokenPolicy(trained_lm, trained_lm.network).evaluate(padded(batch, 4, 3))
    assert torch.isfinite(evaluation.log_probs).all()
    evaluation.log_probs[0].sum().backward(retain_graph=True)
    gradients = [p.grad for p in lora_parameters(trained_lm.network).values()]
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    evaluation.log_probs.sum().backward()
    assert all(
        torch.isfinite(gradient).all() and gradient.abs().max() > 0 for gradient in gradients
    )


def test_kl_is_zero_at_the_start_and_moves_the_lora_alone(
    lm: CausalLM, lm_config: ModelConfig
) -> None:
    network = add_lora(lm, lm_config, seed=0)
    batch, _ = sample_texts(lm)
    policy = TokenPolicy(lm, network)
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
    trained_lm: CausalLM, lm_config: ModelConfig
) -> None:
    batch, _ = sample_texts(trained_lm)
    base = load_causal_lm(lm_config, torch.device("cpu"))
    wanted = TokenPolicy(base, base.network).log_probs(batch, 4)
    policy = TokenPolicy(trained_lm, trained_lm.network)
    with reference_policy(trained_lm.network):
        assert torch.equal(policy.log_probs(batch, 4), wanted)
    assert not torch.equal(policy.log_probs(batch, 4), wanted)


def test_gradient_checkpointing_changes_no_bit_and_leaves_generation_alone(
    trained_lm: CausalLM,
) -> None:
    batch, _ = sample_texts(trained_lm)
    gradients = []
    for checkpointed in (False, True):
        policy = TokenPolicy(trained_lm, trained_lm.network, checkpoint_gradients=checkpointed)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            log_probs = policy.evaluate(batch).log_probs
        log_probs.sum().backward()
        gradients.append(
            (
                len(saved),
                {n: p.grad.clone() for n, p in lora_parameters(trained_lm.network).items()},
            )
        )
        trained_lm.network.zero_grad()
        ids, mask = trained_lm.encode(TEXTS, max_length=8)
        again = policy.rollout(
            ids, mask, SPEC, uniform((SPEC.response_length,), [100, 104, 108], "tokens")
        )
        assert torch.equal(
            again.ids[:, : batch.num_steps], batch.response_ids[::4][:, : again.ids.shape[1]]
        )
    (all_saved, plain), (few_saved, checkpointed_gradients) = gradients
    assert few_saved < all_saved
    assert all(torch.equal(plain[name], checkpointed_gradients[name]) for name in plain)
