"""Reads in the sources of the installed vLLM-Omni what they say about each family of models.

The engine's tables (`PIPELINES`, `QUANTIZED`, `REFUSED`) hold for one release; these tests tell
when another one differs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from flowgrpo_rc.rollout.vllm_omni_engine import PIPELINES, QUANTIZED

if find_spec("vllm_omni") is None:
    pytest.skip("vLLM-Omni is not installed", allow_module_level=True)

# Class of a pipeline -> its transformer among the release's models.
TRANSFORMERS = {
    "StableDiffusion3Pipeline": "sd3/sd3_transformer.py",
    "QwenImagePipeline": "qwen_image/qwen_image_transformer.py",
    "FluxPipeline": "flux/flux_transformer.py",
    "Flux2KleinPipeline": "flux2_klein/flux2_klein_transformer.py",
    "WanPipeline": "wan2_2/wan2_2_transformer.py",
}


def release() -> Path:
    """Returns the folder of vLLM-Omni's sources for diffusion."""
    spec = find_spec("vllm_omni")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "diffusion"


@pytest.mark.parametrize("family", PIPELINES)
def test_the_release_quantizes_what_the_engine_says(family: str) -> None:
    text = (release() / "models" / TRANSFORMERS[family]).read_text()
    assert ("quant_config=quant_config" in text) == (family in QUANTIZED)


def test_the_release_cannot_serve_what_the_engine_refuses() -> None:
    """A newer release may; then the family can be taken in."""
    registry = (release() / "registry.py").read_text()
    assert '"FluxPipeline": (' in registry
    assert '"SanaPipeline": (' not in registry
    z_image = (release() / "models" / "z_image" / "z_image_transformer.py").read_text()
    assert "# attn_mask=attention_mask," in z_image
