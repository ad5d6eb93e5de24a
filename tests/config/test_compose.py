"""Every shipped configuration composes."""

from __future__ import annotations

import pytest
from support.compositions import checked_config

from flowgrpo_rc import assets
from flowgrpo_rc.config.compose import compose_config, config_folder

PROMPTS = f"[{assets.path('prompts/glyph_val.txt')}]"


@pytest.mark.parametrize("name", sorted(path.stem for path in config_folder().glob("*.yaml")))
def test_every_configuration_composes(name: str) -> None:
    files = (
        [] if name == "token_grpo" else [f"data.train_files={PROMPTS}", f"data.val_files={PROMPTS}"]
    )
    # A command of verl-omni chooses its reward itself.
    reward = ["reward.terms.ocr.weight=1"] if name == "verl_omni" else []
    config = checked_config(compose_config([*files, *reward], config_name=name))
    assert config.rollout.n > 1
