"""Makes the parity vectors from the published wheels of verl (a minute, PyPI only).

    python examples/benchmarks/parity_vectors.py

`tests/correction/test_parity.py` compares this project with them. For each version in WHEELS the
script installs `verl==X` by name with `pip install --no-deps --target` into a temporary folder,
runs itself in a subprocess with that folder first on the path, and calls the wheel's own
`verl.trainer.ppo.rollout_corr_helper`. Nothing is stubbed or patched.
REQUIREMENTS is what that import needs in addition to this project's environment, which also lends
torch (2.13.0, so pip never fetches another); 0.6.1 needs transformers 4. Two runs on one machine
write identical files; another CPU may round a float32 `exp` differently in the last bit.

verl_X.json holds settings and metrics, one case per line. verl_X.safetensors holds one flat vector
per tensor: all cases in order, then the exceptions. `load_vectors` reads both. `metrics` are all
that verl returns for float32 inputs, less the prefix "rollout_corr/"; `metrics_float64` are the
same for the inputs cast to float64, so they are free of cancellation. A case is drawn anew if its
decisions change when its log-ratios change by 1e-5 (relative, or of the largest), or in float64.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

FOLDER = Path(__file__).parents[2] / "tests" / "correction" / "parity"
CASES = 300
MARGIN = 1e-5
REQUIREMENTS = """
    tensordict==0.10.0 pyvers==0.2.3 cloudpickle==3.1.2 orjson==3.13.0 codetiming==1.4.0
    ray==2.60.0 msgpack==1.2.4 jsonschema==4.26.0 jsonschema-specifications==2025.9.1
    attrs==26.1.0 referencing==0.37.0 rpds-py==2026.9.1
"""
WHEELS = {
    "0.9.1": [],
    "0.6.1": ["transformers==4.57.1", "huggingface_hub==0.36.0", "tokenizers==0.22.1"],
}
CRITERIA = [
    f"{a}_{k}" for a in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")
]
CRITERIA.remove("seq_max_k1")
SCALES = (
    0.0,
    *(1e-4,) * 3,
    *(1e-2,) * 4,
    *(0.3,) * 4,
    *(1.0,) * 4,
    *("extreme",) * 3,
    "beyond_bound",
)
LEVELS = (
    (None, "token_k1"),
    ("token", "token_k1"),
    ("sequence", "seq_sum_k1"),
    ("geometric", "seq_mean_k1"),
)
TRUNCATION = (1.05, 1.5, 2.0, 5.0, 10.0)
ICEPOP = ("0.5_2.0", "0.8_1.25", "0.5_5.0", "0.98_1.02", "0.1_3.0")
TENSORS = (
    "old_log_prob",
    "rollout_log_prob",
    "response_mask",
    "modified_mask",
    "metrics_float64",
    "weights",
)
Case = dict[str, Any]


def load_vectors(version: str, part: str = "cases") -> list[Case]:
    """Returns the cases (or part="exceptions") of one version of verl, with tensors [B, T].

    It needs no verl.
    """
    stem = f"{FOLDER}/verl_{version.replace('.', '_')}"
    index = json.loads(Path(f"{stem}.json").read_text())
    flat = load_file(f"{stem}.safetensors")
    start = dict.fromkeys(flat, 0)
    for case in index["cases"] + index["exceptions"]:
        shape = case.pop("shape")
        ids = case.pop("metric_ids")
        for name in TENSORS if case["weights"] else TENSORS[:-1]:
            size = [len(ids)] if name == "metrics_float64" else shape
            case[name] = flat[name][start[name] :][: math.prod(size)].reshape(size)
            start[name] += math.prod(size)
        case["weights"] = case["weights"] if isinstance(case["weights"], Tensor) else None
        names = [index["metric_names"][number] for number in ids]
        case["metrics"] = dict(zip(names, case["metrics"], strict=True))
        case["metrics_float64"] = dict(zip(names, case["metrics_float64"].tolist(), strict=True))
    return index[part]


def draw_mask(rng: random.Random, empty: bool) -> Tensor:
    mask = torch.ones(rng.randint(1 + empty, 8), rng.randint(1, 24), dtype=torch.int64)
    kind = rng.choice(("full", "right", "left", "holes"))
    columns = range(mask.shape[1])
    for row in mask:
        gone = rng.randrange(len(columns))
        places = {"full": (), "right": columns[len(columns) - gone :], "left": columns[:gone]}
        row[list(places.get(kind, rng.sample(columns, gone)))] = 0
    if empty:
        mask[rng.sample(range(len(mask)), rng.randint(1, len(mask) - 1))] = 0
    return mask


def draw_log_ratio(rng: random.Random, scale: float | str, mask: Tensor) -> Tensor:
    size = 0.3 if isinstance(scale, str) else scale
    rows = [
        [rng.gauss(drift, size) for _ in row]
        for row in mask
        for drift in [0.5 * rng.gauss(0, size)]
    ]
    for i, j in (
        rng.sample(mask.nonzero().tolist(), max(1, int(mask.sum()) // 8))
        if isinstance(scale, str)
        else ()
    ):
        rows[i][j] = rng.choice((-1, 1)) * (
            rng.uniform(5, 18) if scale == "extreme" else rng.uniform(20.5, 30)
        )
    return torch.tensor(rows, dtype=torch.float64)


def log_probs(rng: random.Random, log_ratio: Tensor) -> Case:
    base = torch.tensor(
        [[-rng.expovariate(0.7) for _ in row] for row in log_ratio], dtype=torch.float64
    )
    pair = {
        "old_log_prob": base + log_ratio.clamp(max=0),
        "rollout_log_prob": base - log_ratio.clamp(min=0),
    }
    return {name: value.float() for name, value in pair.items()}


def draw_upper(rng: random.Random, criterion: str, log_ratio: Tensor, mask: Tensor) -> float:
    """Draws an upper bound.

    One in four is a usual bound; the others lie amid the statistic's values and so reject a part of
    them.
    """
    level, kind = criterion.rsplit("_", 1)
    if rng.random() < 0.25 or not log_ratio.any():
        return rng.choice(
            (1.05, 1.25, 2.0, 5.0, 10.0) if kind == "k1" else (0.001, 0.01, 0.1, 0.5, 2.0)
        )
    x = log_ratio.clamp(-20, 20)
    k = {"k1": -x, "k2": x.square() / 2, "k3": torch.expm1(x) - x}[kind]
    rows = [row[valid.bool()] for row, valid in zip(k, mask, strict=True) if valid.any()]
    reducers: Case = {
        "token": torch.clone,
        "seq_sum": torch.sum,
        "seq_mean": torch.mean,
        "seq_max": torch.max,
    }
    values = (
        torch.cat([reducers[level](row).reshape(-1) for row in rows]).abs().sort().values.tolist()
    )
    value = max(values[int(rng.uniform(0.2, 1) * len(values))] * rng.uniform(0.7, 1.3), 3e-5)
    return float(f"{math.exp(min(value, 12)) if kind == 'k1' else value:.7g}")


def draw_0_9_1(rng: random.Random, index: int, log_ratio: Tensor, mask: Tensor) -> Case:
    chain = list(dict.fromkeys([CRITERIA[index % len(CRITERIA)], *rng.sample(CRITERIA, 3)]))
    chain = chain[: rng.choices((0, 1, 2, 3), (1, 5, 2, 2))[0]]
    specs: list[Any] = []
    for name in chain:
        upper = draw_upper(rng, name, log_ratio, mask)
        lower = (
            1 / (1 + (upper - 1) * rng.choice((0.3, 0.5, 2.0, 3.0))) if name.endswith("k1") else 0.0
        )
        bands = (upper, f"{1 / upper!r}_{upper!r}", f"{lower!r}_{upper!r}")
        specs.append(rng.choices(bands, (3, 4, 2))[0] if name.endswith("k1") else upper)
    if (
        chain and rng.random() < 0.4
    ):  # one scalar for all; a k1 also takes its reciprocal, so it must be above 1
        leading = next((name for name in chain if name.endswith("k1")), chain[0])
        specs = [draw_upper(rng, leading, log_ratio, mask)]
    return {
        "rollout_is": (None, "token", "sequence")[index % 3],
        "rollout_is_threshold": rng.choice(ICEPOP if rng.random() < 0.4 else TRUNCATION),
        "rollout_is_batch_normalize": rng.random() < 0.4,
        "rollout_rs": ",".join(chain) or None,
        "rollout_rs_threshold": specs[0] if len(specs) == 1 else ",".join(map(str, specs)) or None,
    }


def draw_0_6_1(rng: random.Random, index: int, log_ratio: Tensor, mask: Tensor) -> Case:
    level, criterion = LEVELS[index % 4]
    upper = draw_upper(rng, criterion, log_ratio, mask)
    lower = (
        float(f"{1 / (1 + (upper - 1) * rng.choice((0.5, 1.0, 2.0))):.7g}")
        if rng.random() < 0.5
        else None
    )
    veto = rng.choice((None, None, 1e-4, 1e-3, 1e-2))
    return {
        **{
            "rollout_is": (None, "token", "sequence")[index % 3],
            "rollout_is_threshold": rng.choice(TRUNCATION),
        },
        **{"rollout_rs": level, "rollout_rs_threshold": upper, "rollout_rs_threshold_lower": lower},
        **{"rollout_token_veto_threshold": veto, "rollout_is_batch_normalize": rng.random() < 0.4},
    }


def verl(case: Case, old: Tensor, rollout: Tensor) -> Case:
    correct = import_module(
        "verl.trainer.ppo.rollout_corr_helper"
    ).compute_rollout_correction_and_rejection_mask
    proto, mask, metrics = correct(old, rollout, case["response_mask"], **case["settings"])
    metrics = {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}
    weights = None if proto is None else proto.batch["rollout_is_weights"]
    return {"weights": weights, "modified_mask": mask.to(torch.uint8), "metrics": metrics}


def finish(case: Case) -> Case:
    old = case["old_log_prob"]
    rollout = case["rollout_log_prob"]
    try:
        double = torch.tensor(
            list(verl(case, old.double(), rollout.double())["metrics"].values()),
            dtype=torch.float64,
        )
        return case | verl(case, old, rollout) | {"metrics_float64": double}
    except ArithmeticError as error:
        nothing = {"weights": None, "modified_mask": case["response_mask"], "metrics": {}}
        return (
            case
            | nothing
            | {"metrics_float64": torch.zeros(0), "raises": f"{type(error).__name__}: {error}"}
        )


def is_on_edge(case: Case) -> bool:
    rollout = case["rollout_log_prob"].double()
    x = case["old_log_prob"].double() - rollout
    shift = MARGIN * (x * case["response_mask"]).abs().max().clamp(max=1)
    near = (x, x * (1 + MARGIN), x * (1 - MARGIN), x + shift, x - shift)
    results = [case, *(verl(case, rollout + other, rollout) for other in near)]
    masks = {str(result["modified_mask"].tolist()) for result in results}
    fractions = {
        str([round(v, 6) for n, v in r["metrics"].items() if "fraction" in n]) for r in results
    }
    return len(masks) + len(fractions) > 2


def draw_case(version: str, index: int) -> Case:
    rng = random.Random(f"{version} {index}")
    scale = SCALES[index % len(SCALES)]
    while True:
        empty = rng.random() < 0.12
        mask = draw_mask(rng, empty)
        log_ratio = draw_log_ratio(rng, scale, mask)
        settings = (draw_0_9_1 if version == "0.9.1" else draw_0_6_1)(rng, index, log_ratio, mask)
        # Arbitrary numbers at padded positions, or zeros.
        keep = rng.choice((torch.ones_like(mask), mask))
        inputs = {name: value * keep for name, value in log_probs(rng, log_ratio).items()}
        bands = [
            part.split("_")
            for part in str(settings["rollout_rs_threshold"]).split(",")
            if "_" in part
        ]
        asymmetric = any(
            abs(math.log(float(lower) * float(upper))) > 1e-9 for lower, upper in bands
        )
        flags: Case = {
            "scale": scale,
            "on_policy": scale == 0,
            "empty_rows": empty,
            "asymmetric": asymmetric,
        }
        flags |= {"extreme": isinstance(scale, str), "beyond_bound": scale == "beyond_bound"}
        case = finish({"settings": settings, "flags": flags, "response_mask": mask} | inputs)
        if "raises" not in case and not is_on_edge(case):
            return case


def exceptions() -> Iterator[Case]:
    """Returns cases in which 0.9.1 differs as documented; `raises` says that verl raises."""

    def make(name: str, rows: list[list[float]], valid: Any = 1, **settings: Any) -> Case:
        log_ratio = torch.tensor(rows, dtype=torch.float64)
        case: Case = {"name": name, "settings": settings, "flags": {}} | log_probs(
            random.Random(name), log_ratio
        )
        return finish(case | {"response_mask": torch.tensor(valid).expand(log_ratio.shape)})

    # Ratios 1, 3, 0.3, 5, 0.15: verl holds 1/ratio against [0.5, 4], so it rejects 3 and keeps 0.3.
    for level, share in (("token", 1.0), ("seq_sum", 0.5), ("seq_mean", 1.0)):
        rows = [[math.log(ratio) * share] * 2 for ratio in (1.0, 3.0, 0.3, 5.0, 0.15)]
        yield make(
            "asymmetric_band", rows, rollout_rs=f"{level}_k1", rollout_rs_threshold="0.5_4.0"
        )
    for scale in (1e-4, 1e-5, 1e-6):
        noises = (
            torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)) * scale
            for seed in range(1000)
        )
        both: Case = {"rollout_is": "token", "rollout_rs": "token_k3", "rollout_rs_threshold": 0.01}
        found = (make("float32_cancellation", rows.tolist(), **both) for rows in noises)
        yield next(
            case
            for case in found
            if case["metrics"]["k3_kl"] < 0 and case["metrics"]["rollout_is_std"] == 0
        )
    # The row without a valid token counts as perplexity 1, log-ratio sum 0 and mean weight 0 in
    # averages over rows.
    rows = [[0.5, 0.4, 0.3], [0.2, -0.1, 0.6], [1.0, 1.0, 1.0]]
    valid = [[1, 1, 1], [1, 1, 0], [0, 0, 0]]
    for level, criterion in (("token", "token_k1"), ("sequence", "seq_sum_k1")):
        settings: Case = {
            "rollout_is": level,
            "rollout_is_batch_normalize": True,
            "rollout_rs": criterion,
        }
        yield make("empty_row", rows, valid, **settings, rollout_rs_threshold=2.0)
    # Tokens are clamped to +-20 before the sum or mean: [40, -20] counts as 0 and is kept, [40,
    # -19] is rejected.
    rows = [[40.0, -20.0], [40.0, -19.0], [0.1, 0.1]]
    for criterion in ("seq_sum_k1", "seq_mean_k1"):
        yield make("clamped_tokens", rows, rollout_rs=criterion, rollout_rs_threshold=1.25)
    yield make("all_zero_weights", [[2.0, 3.0]], rollout_is="token", rollout_is_threshold="0.5_2.0")


def generate(version: str) -> None:
    torch.set_num_threads(1)
    assert (metadata.version("verl"), torch.__version__.split("+")[0]) == (version, "2.13.0"), (
        torch.__version__
    )
    parts = {"cases": [draw_case(version, index) for index in range(CASES)], "exceptions": []}
    parts["exceptions"] += exceptions() if version == "0.9.1" else ()
    everything = parts["cases"] + parts["exceptions"]
    names = list(dict.fromkeys(name for case in everything for name in case["metrics"]))
    flat: dict[str, list[Tensor]] = {name: [] for name in TENSORS}
    for case in everything:
        case |= {
            "shape": list(case["response_mask"].shape),
            "metric_ids": [names.index(n) for n in case["metrics"]],
        }
        case["metrics"] = [float(f"{value:.9g}") for value in case["metrics"].values()]
        for name, value in [(name, case.pop(name)) for name in TENSORS]:
            if value is not None:
                flat[name].append((value.to(torch.uint8) if "mask" in name else value).flatten())
            case["weights"] = value is not None  # the last of TENSORS
    stem = f"{FOLDER}/verl_{version.replace('.', '_')}"
    Path(f"{stem}.safetensors").write_bytes(
        save({name: torch.cat(pieces) for name, pieces in flat.items()})
    )
    index = {"verl": version, "torch": torch.__version__, "metric_names": names, **parts}
    text = json.dumps(index, separators=(",", ":"), allow_nan=False)
    Path(f"{stem}.json").write_text(re.sub(r"([\[,])(?=\{)", "\\1\n", text) + "\n")


def install(version: str, folder: str) -> None:
    """Installs a published version of verl, and what its import needs beside this environment."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--target",
        folder,
    ]
    subprocess.run([*pip, f"verl=={version}", *REQUIREMENTS.split(), *WHEELS[version]], check=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for version in WHEELS:
            install(version, f"{folder}/{version}")
            environment = os.environ | {"PYTHONPATH": f"{folder}/{version}"}
            subprocess.run(
                [sys.executable, "-W", "ignore", __file__, version], check=True, env=environment
            )


if __name__ == "__main__":
    generate(sys.argv[1]) if sys.argv[1:] else main()
