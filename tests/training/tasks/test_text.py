"""The text task: evaluation, requests, what it observes, saved samples."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from support.text_rollouts import SPEC, TEXTS
from support.tiny_language_model import EOS, PAD
from transformers import GenerationConfig

from flowgrpo_rc.batch import Prompt, PromptBatch, TokenBatch
from flowgrpo_rc.core.tokens import until_end
from flowgrpo_rc.models.causal_lm import CausalLM
from flowgrpo_rc.policies.token import TokenPolicy
from flowgrpo_rc.records.samples import Shown
from flowgrpo_rc.report.folder import first_and_last_samples
from flowgrpo_rc.rollout.config import EvaluationConfig, RolloutConfig
from flowgrpo_rc.rollout.engine import TextRequest
from flowgrpo_rc.training.tasks.text import TextTask


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


def test_evaluation_is_greedy_by_default(trained_lm: CausalLM) -> None:
    prompts = [Prompt(text=text, index=i) for i, text in enumerate(TEXTS)]
    ids, mask = trained_lm.encode(TEXTS, max_length=8)
    stock = trained_lm.network.generate(
        ids,
        attention_mask=mask.long(),
        generation_config=GenerationConfig(
            do_sample=False,
            max_new_tokens=6,
            pad_token_id=PAD,
            eos_token_id=list(trained_lm.eos_ids),
        ),
    )[:, ids.shape[1] :]
    wanted = trained_lm.decode(stock, until_end(stock, torch.tensor(trained_lm.eos_ids)))
    seeds = [0] * len(prompts)
    assert task(trained_lm).sample(prompts, seeds).samples == wanted
    assert task(trained_lm).sample(prompts[::-1], seeds).samples == wanted[::-1]


def test_evaluation_at_a_temperature_depends_on_the_seeds_alone(trained_lm: CausalLM) -> None:
    prompts = [Prompt(text="1+2=", index=i) for i in range(12)]
    warm = task(trained_lm, temperature=1.5)
    together = warm.sample(prompts, range(12)).samples
    assert len(set(together)) > 1
    alone = [warm.sample([prompts[0]], [seed]).samples[0] for seed in range(12)]
    assert together == alone
    assert together != warm.sample(prompts, range(12, 24)).samples


def test_what_is_observed(trained_lm: CausalLM) -> None:
    ids = torch.tensor([[2, 3, EOS, 0], [EOS, 0, 0, 0], [2, 2, 2, 2], [2, 2, 2, 14], [2, 2, 2, 2]])
    batch = TokenBatch(
        spec=replace(SPEC, response_length=4),
        prompt_ids=torch.ones(5, 1, dtype=torch.int64),
        prompt_mask=torch.ones(5, 1, dtype=torch.bool),
        response_ids=ids,
        response_mask=until_end(ids, torch.tensor(trained_lm.eos_ids)),
        group=torch.zeros(5, dtype=torch.int64),
        seed=torch.arange(5),
        policy_version=torch.zeros(5, dtype=torch.int64),
    )
    assert task(trained_lm).observe(batch, Shown(), 1).compute() == {
        "response/length_mean": 16 / 5,
        "response/length_max": 4.0,
        "response/length_min": 1.0,
        "response/limit_fraction": 2 / 5,
        "response/empty_fraction": 1 / 5,
    }


def test_the_request_has_the_configured_spec(trained_lm: CausalLM) -> None:
    prompts = PromptBatch(step=1, prompts=[Prompt(text="1+2=", index=0)], slots=[4])
    made = task(trained_lm).request(prompts, [7, 8])
    assert made == TextRequest(prompts=prompts, samples_per_prompt=2, spec=SPEC, seeds=[7, 8])


def test_saved_samples_and_their_report(trained_lm: CausalLM, tmp_path: Path) -> None:
    prompts = [Prompt(text="1+<b>=", index=0, target="3"), Prompt(text="2+2=", index=1)]
    stem = tmp_path / "samples" / "step_000000"
    assert (
        task(trained_lm).save_samples(stem, ["3\u2028", "</td>"], prompts, [1.0, float("nan")])
        is None
    )
    rows = [json.loads(line) for line in stem.with_suffix(".jsonl").read_text().split("\n") if line]
    assert rows == [
        {"prompt": "1+<b>=", "target": "3", "completion": "3\u2028", "score": 1.0},
        {"prompt": "2+2=", "target": None, "completion": "</td>", "score": None},
    ]
    ((_, names, cells),) = first_and_last_samples(tmp_path)["tables"]
    assert names == ["prompt", "target", "Step 0", "score"]
    assert cells == [["1+<b>=", "3", "3\u2028", "1.00"], ["2+2=", "", "</td>", "failed"]]
    task(trained_lm).save_samples(
        stem.with_name("step_000020"), ["last", "4"], prompts, [0.25, 0.0]
    )
    ((_, names, cells),) = first_and_last_samples(tmp_path)["tables"]
    assert names[2:] == ["Step 0", "score", "Step 20", "score"]
    assert cells[0] == ["1+<b>=", "3", "3\u2028", "1.00", "last", "0.25"]
