"""An engine that does not do what the trainer asks ends the run with a line that says what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults import fault

from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.models.lora import lora_parameters
from flowgrpo_rc.rollout.engine import EngineLost
from flowgrpo_rc.rollout.vllm_omni_engine import VllmOmniEngine

# A child that dies at its second LoRA; the file says how many children may still die.
MORTAL = """
    left = int(open(sys.argv[0] + ".left").read())
    if count > 1 and left:
        open(sys.argv[0] + ".left", "w").write(str(left - 1))
        os._exit(3)
    send(connection, "done", held, {})
"""


@fault(
    "the process of a vLLM-Omni engine dies",
    "it is started again with the same LoRA, at most max_restarts times",
)
def test_an_engine_that_dies(
    fake_engine: Callable[[str], VllmOmniEngine],
    model: FlowModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    deaths = 4
    (tmp_path / "child.py.left").write_text(str(deaths))
    engine = fake_engine(MORTAL.strip())
    for version in range(1, 1 + deaths):
        state = {name: p.detach() + version for name, p in lora_parameters(model.network).items()}
        if version == deaths:
            with pytest.raises(EngineLost, match="while it worked on 'sync'"):
                engine.sync_weights(state, version)
        else:
            engine.sync_weights(state, version)
    engine.close()
    told = [record.message for record in caplog.records]
    assert len(told) == 3
    assert "it is started again (engine_kwargs.max_restarts allows 2 more)" in told[0]
