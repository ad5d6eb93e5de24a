"""Clean runs of the bundled model in several pairs of precisions: no alarm of a fault may come.

Each run trains for 50 iterations of 16 samples in bypass mode. Reported: all warnings, the range of
`mismatch_over_expected`, above 2 of which a fault is reported, and the ranges of what is said about
the noise. It takes a minute for a pair on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from flowgrpo_rc.records.metrics_file import MetricsFile

MEANS = (
    "algorithm.rollout_correction.rollout_rs=step_kl",
    "algorithm.rollout_correction.rollout_rs_threshold=auto:4",
)
PAIRS = {
    "fp32": ["rollout.dtype=fp32"],
    "fp32, with means": ["rollout.dtype=fp32", *MEANS],
    "bf16, with means": ["rollout.dtype=bf16", *MEANS],
    "fp32, other batch shape": ["rollout.dtype=fp32", "rollout.micro_batch_size_per_gpu=2"],
    "fp16": ["rollout.dtype=fp16"],
    "bf16": ["rollout.dtype=bf16"],
    "fp32+int8_dynamic": ["rollout.dtype=fp32", "rollout.quantization=int8_dynamic"],
    "bf16+int8": ["rollout.dtype=bf16", "rollout.quantization=int8"],
    "bf16+fp8": ["rollout.dtype=bf16", "rollout.quantization=fp8"],
    "bf16+int4": ["rollout.dtype=bf16", "rollout.quantization=int4"],
    "bf16, guidance 4.5": ["rollout.dtype=bf16", "rollout.pipeline.guidance_scale=4.5"],
    "bf16, bf16 autocast in training": ["rollout.dtype=bf16", "trainer.mixed_precision=bf16"],
}
SIZES = [
    *(
        "data.train_batch_size=4",
        "rollout.n=4",
        "actor.ppo_mini_batch_size=2",
        "rollout.val_kwargs.n=1",
    ),
    *(
        "actor.ppo_micro_batch_size_per_gpu=8",
        "rollout.micro_batch_size_per_gpu=8",
        "trainer.test_freq=0",
    ),
    *(
        "rollout.val_kwargs.num_inference_steps=2",
        "trainer.save_freq=0",
        "trainer.device=cpu",
        "trainer.logger=[]",
    ),
    *("reward.terms.ocr=null", "reward.terms.jpeg.weight=1"),
]

WATCHED = (
    "actor/rollout_corr/mismatch_over_expected",
    "rollout/noise_variance",
    "rollout/noise_shared_max",
    "rollout/noise_of_seed_min",
    "rollout/conditioning_error_max",
    "rollout/latents_16bit_fraction",
)


def measure(name: str, iterations: int) -> dict[str, object]:
    with TemporaryDirectory() as folder:
        settings = [
            *SIZES,
            *PAIRS[name],
            f"trainer.total_training_steps={iterations}",
            f"trainer.output_dir={folder}",
        ]
        # A process of its own: accelerate keeps the precision for the whole of one.
        command = [sys.executable, "-m", "flowgrpo_rc.train", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = MetricsFile(Path(folder) / "metrics.jsonl").rows()[1:]
        alarms = [str(row["message"]) for row in MetricsFile(Path(folder) / "health.jsonl").rows()]
    ranges = {}
    for metric in WATCHED:
        values = [row[metric] for row in rows if metric in row]
        ranges[metric] = [min(values), max(values)]
    return {"iterations": len(rows), "alarms": alarms, **ranges}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--pair", choices=sorted(PAIRS), action="append")
    options = parser.parse_args()
    for name in options.pair or PAIRS:
        print(json.dumps({name: measure(name, options.iterations)}), flush=True)


if __name__ == "__main__":
    main()
