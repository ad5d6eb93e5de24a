"""Writes the table of mismatch by family and precision in docs/extending.md: `make mismatch`.

It takes the random checkpoints of tests/support/tiny_models.py, so `tests` and `examples` have to
be importable. The numbers depend on the processor a little; `tests/docs/test_mismatch_table.py`
measures again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from support.image_rollouts import trained_lora
from support.tiny_models import TINY, Tiny

from flowgrpo_rc.batch import Prompt, PromptBatch
from flowgrpo_rc.models.base import FlowModel, adapters_by_pipeline
from flowgrpo_rc.policies.flow import FlowPolicy
from flowgrpo_rc.rollout.diffusers_engine import DiffusersEngine
from flowgrpo_rc.rollout.engine import ImageRequest

PAGE = Path(__file__).parent / "extending.md"
START = "<!-- Written by `make mismatch`. -->\n"
END = "<!-- End of what is written. -->\n"
# Those whose random checkpoint can be built without a further package.
FAMILIES = sorted(name for name, tiny in TINY.items() if not tiny.packages)
# Precision of the rollout and quantization of its weights.
PRECISIONS = (("fp32", None), ("fp16", None), ("bf16", None), ("bf16", "int8"))
TEXTS = ('"AB7X"', '"HI"')
SAMPLES = 4  # of each prompt
STEPS = 3  # all but the last of four


def page() -> str:
    """Returns docs/extending.md with the table as it is measured now."""
    text = PAGE.read_text(encoding="utf-8")
    before, found, rest = text.partition(START)
    assert found, f"{PAGE.name} has no {START!r}"
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{''.join(table())}\n{END}{after}"


def table() -> Iterator[str]:
    """Yields the rows of the table."""
    names = [name if how is None else f"{name}+{how}" for name, how in PRECISIONS]
    yield f"| pipeline | guidance | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}\n"
    for pipeline in FAMILIES:
        model = loaded(pipeline)
        network = trained_lora(model)
        for guided in (False, True):
            found = [mismatch(model, network, TINY[pipeline], guided, *p) for p in PRECISIONS]
            cells = " | ".join(_short(value) for value in found)
            yield f"| `{pipeline}` | {'yes' if guided else 'no'} | {cells} |\n"


def loaded(pipeline: str) -> FlowModel:
    """Returns the random checkpoint of a pipeline class, wrapped by its adapter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stock = TINY[pipeline].build()
    stock.set_progress_bar_config(disable=True)
    return adapters_by_pipeline()[pipeline](stock, torch.device("cpu"))


def mismatch(
    model: FlowModel,
    network: torch.nn.Module,
    tiny: Tiny,
    guided: bool,
    dtype: str,
    quantization: str | None,
) -> float:
    """Returns the mean |log-prob of fp32 training - log-prob of the rollout| of sampled steps."""
    samples = len(TEXTS) * SAMPLES
    prompts = [
        Prompt(text=text, index=i, target="", images=tiny.images(i)) for i, text in enumerate(TEXTS)
    ]
    engine = DiffusersEngine(
        model, network, dtype=dtype, quantization=quantization, chunk_size=samples
    )
    guidance = tiny.guided if guided else tiny.unguided
    request = ImageRequest(
        prompts=PromptBatch(step=1, prompts=prompts, slots=range(len(prompts))),
        samples_per_prompt=SAMPLES,
        spec=tiny.spec("sde", guidance, dtype=dtype),
        window=torch.arange(STEPS).expand(samples, STEPS),
        seeds=list(range(samples)),
        decode=False,
    )
    (chunk,) = engine.generate(request)
    trained = FlowPolicy(model, network).log_probs(chunk.batch, samples)
    return (trained - chunk.batch.rollout_log_probs).abs().mean().item()


def _short(value: float) -> str:
    """Returns a number as `2.4e-5`, and zero as `0`."""
    return f"{value:.1e}".replace("e-0", "e-") if value else "0"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
