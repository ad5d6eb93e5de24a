"""Every shipped configuration composes."""

from __future__ import annotations

import pytest

from flowgrpo_rc import assets
from flowgrpo_rc.config.compose import compose_config, config_folder, to_config

PROMPTS = f"[{assets.path('prompts/glyph_val.txt')}]"


@pytest.mark.parametrize("name", sorted(path.stem for path in config_folder().glob("*.yaml")))
def test_every_configuration_composes(name: str) -> None:
    files = (
        [] if name == "token_grpo" else [f"data.train_files={PROMPTS}", f"data.val_files={PROMPTS}"]
    )
    config = to_config(compose_config(files, config_name=name))
    assert config.rollout.n > 1
