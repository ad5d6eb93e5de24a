"""Fabricated run folders to report on, and a reader of the pages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from flowgrpo_rc.records.samples import save_grid

VOID = {"meta", "img", "br", "hr", "link", "wbr"}


class Page(HTMLParser):
    """Collects ids, text and resource references, and checks that tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.images: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.references += [
            value
            for name, value in attrs
            if name in ("src", "href", "srcset", "action") and value and not value.startswith("#")
        ]
        found = {name: value or "" for name, value in attrs}
        if tag == "img":
            self.images.append((found["alt"], found["src"]))
        assert not any(name.startswith("on") for name in found)
        if tag not in VOID:
            self.open.append(tag)

    def pictures(self, alt: str) -> list[str]:
        return [source for text, source in self.images if text == alt]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def chart_data(page: str, title: str) -> dict[str, Any]:
    pattern = (
        rf'aria-label="{re.escape(title)};[^>]*><script type="application/json">(.*?)</script>'
    )
    (found,) = re.findall(pattern, page)
    return dict(json.loads(found))


def visible_text(page: str) -> str:
    return "".join(Page(re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)).text)


def write_rows(
    folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "metrics.jsonl"
) -> Path:
    """Writes a file with one JSON object a line into a run's folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def metric_row(step: int, rng: np.random.Generator) -> dict[str, float]:
    noise = float(rng.normal())
    row = {
        "reward/mean": 0.45 + 0.25 * (1 - math.exp(-step / 25)) + 0.02 * noise,
        "reward/std": 0.2,
        "reward/ocr": 0.45 + 0.25 * (1 - math.exp(-step / 25)) + 0.02 * noise,
        "actor/pg_loss": 1e-5 * noise,
        "actor/clip_fraction": 0.3 + 0.05 * noise,
        "actor/clip_fraction_higher": 0.16 + 0.02 * noise,
        "actor/clip_fraction_lower": 0.14 + 0.03 * noise,
        "actor/ratio_std": 3e-5 * (1 + 0.1 * abs(noise)),
        "actor/grad_norm": 0.02 + 0.002 * noise,
        "actor/lr": 3e-4,
        "perf/samples_per_second": 40 + noise,
        "perf/peak_memory_gib": 1.4,
        "timing_s/rollout": 2.0,
        "timing_s/update": 2.6,
        "timing_s/reward": 0.5,
        "timing_s/step": 5.3,
    }
    correction = {
        "rollout_is_mean": 1 + 2e-5 * noise,
        "rollout_is_max": 1 + 3e-4 + 2e-5 * abs(noise),
        "rollout_is_min": 1 - 3e-4 - 2e-5 * abs(noise),
        "rollout_is_eff_sample_size": 1 - 1e-8,
        "rollout_rs_masked_fraction": 0.02 + 0.005 * noise,
        "rollout_rs_seq_masked_fraction": 0.04 + 0.01 * noise,
        "rollout_is_veto_fraction": 0.0,
        "kl": 1e-5 * noise,
        "k3_kl": 3e-9,
        "log_ppl_abs_diff": 8e-5 + 1e-6 * noise,
        "chi2_token": 1e-8,
        "chi2_seq": 2e-8,
        "mismatch_over_clip": 0.8 + 0.1 * noise,
        "logprob_abs_diff_mean": 8e-5,
        "logprob_abs_diff_p50": 5e-5,
        "logprob_abs_diff_p99": 4e-4,
        "logprob_abs_diff_max": 1e-3 * (1 + 0.2 * abs(noise)),
    }
    correction |= {
        f"logprob_abs_diff/ts_{t}": 2e-5 * 1000 / t * (1 + 0.1 * noise)
        for t in (1000, 960, 900, 810, 660, 400)
    }
    return row | {f"actor/rollout_corr/{name}": value for name, value in correction.items()}


def make_run(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    rows: list[dict[str, float | None]] = [
        {"step": 0, "val/reward": 0.412, "val/ocr": 0.412, "val/ocr/exact": 0.11}
    ]
    for step in range(1, 61):
        row: dict[str, float | None] = {"step": step, **metric_row(step, rng)}
        if step % 20 == 0:
            reward = 0.412 + 0.25 * (1 - math.exp(-step / 25))
            row |= {"val/reward": reward, "val/ocr": reward, "val/ocr/exact": reward - 0.3}
        rows.append(row)
    rows[7]["actor/pg_loss"] = None
    write_rows(folder, rows)
    images = rng.integers(0, 255, (8, 32, 64, 3), dtype=np.uint8)
    for step in (0, 20, 60):
        captions = [f'"w{i}" 0.{step}' for i in range(8)]
        save_grid(folder / "samples" / f"step_{step:06d}.png", images, captions)
    (folder / "config.yaml").write_text(
        "trainer:\n  experiment_name: ocr <b>bypass</b>\n  total_training_steps: 60\nmodel:\n  "
        "path: bundled\nreward:\n  remote:\n    api_key: hunter2\n    url: "
        "http://user:hunter3@host/score\ndata:\n  train_files: words.txt\n"
    )
    command = ["train", "a_token=hunter4", "reward.remote.api_key=hunter5"]
    environment: dict[str, object] = {"python": "3.11", "device": "cpu", "command": command}
    environment |= {"processes": 2, "started": "2026-01-02T03:04+00:00", "git": "1234abc-dirty"}
    environment["packages"] = {"flowgrpo-rc": "0.2.0", "torch": "2.13.0"}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "decided.json").write_text('{"Model": "sd3", "Mode": "bypass, why"}')
    (folder / "health.jsonl").write_text(
        '{"step": 12, "message": "kl is 0.2 <script>alert(1)</script>"}\n'
    )
    make_rejected(folder)
    for step in (20, 60):
        (folder / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step}" / "state.pt").write_bytes(b"0" * 2_000_000)
    (folder / "checkpoints" / "step_61.tmp").mkdir()
    (folder / "lora").mkdir()
    (folder / "lora" / "pytorch_lora_weights.safetensors").write_bytes(b"0" * 500_000)
    return folder


def make_rejected(run: Path) -> None:
    """Writes two samples in every second step; one is not finite."""
    reasons = [{"criterion": "seq_mean_k1", "value": 1.00031, "lower": 0.9998, "upper": 1.0002}]
    broken = [{"criterion": "not finite", "value": None, "lower": None, "upper": None}]
    rows = []
    for step in range(2, 61, 2):
        row = {"step": step, "timestep": 750, "log_ratio": 3e-4 + 1e-5 * step, "reasons": reasons}
        rows.append(row | {"reward": 0.25, "prompt": f"a sign {step}"})
        text = {"prompt": "1+1=", "text": "<b>3</b>", "reward": None, "log_ratio": None}
        rows.append(row | text | {"reasons": broken})
    write_rows(run, rows, "rejected.jsonl")
