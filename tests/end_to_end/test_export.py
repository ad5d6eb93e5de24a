"""What a run leaves is exported with a model card whose program works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from support.runs import Train, read_rows

from flowgrpo_rc.cli import main

RC = "algorithm.rollout_correction"


@pytest.mark.slow
def test_a_run_leaves_rejected_samples_and_a_card_that_works(
    train: Train, tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real steps, with a band that no bf16 rollout stays within."""
    band = (f"{RC}.rollout_rs=token_k1", f"{RC}.rollout_rs_threshold=0.9999999_1.0000001")
    assert train(*band, f"{RC}.bypass_mode=true", "rollout.dtype=bf16") == 0
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "rejected.jsonl").read_text().splitlines()]
    assert read_rows(run)[1]["actor/rollout_corr/rollout_rs_masked_fraction"] > 0.5
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4
    assert {row["reasons"][0]["criterion"] for row in rows} == {"token_k1"}
    assert "Largest rejected difference" in (run / "report.html").read_text()

    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    written = (tmp_path / "out" / "README.md").read_text()
    assert written == (run / "lora" / "README.md").read_text()
    assert yaml.safe_load(written.split("---\n")[1])["library_name"] == "diffusers"
    (program,) = re.findall(r"```python\n(.*?)```", written, re.DOTALL)
    program = program.replace(f"path/to/{checkpoint.name}", str(checkpoint))
    names: dict[str, object] = {}
    exec(program.replace("path/to/this/folder", str(tmp_path / "out")), names)
    height, width = (int(re.search(rf"\b{side}=(\d+)", program)[1]) for side in ("height", "width"))
    assert names["image"].size == (width, height)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("# My project\n")
    capsys.readouterr()
    assert main(["export", str(run), "--out", str(tmp_path / "mine")]) == 2
    assert "README.md that is not ours" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["README.md"]
    assert main(["export", str(run), "--out", str(run)]) == 2
    assert "is the folder of the run itself" in capsys.readouterr().err
