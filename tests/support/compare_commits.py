"""Proves that a refactor changed nothing: trains small cases in two checkouts, compares every bit.

    python tests/support/compare_commits.py BEFORE AFTER [--cases a,b] [--jobs 2]

It trains each case with both git revisions, compares all files that they leave, and exits with 1 if
anything differs.

There is no tolerance. Numbers are compared as JSON text, tensors and pixels by their bytes, other
files by line. A file that only one side has is a difference. Left out is

* what differs between two runs of the same code: in metrics.jsonl seconds, speed, memory and what
  workers were busy with, in report.html the section and three tiles that show them, and the time
  and the commit at which a run started;
* the path of the checkout, wherever a file names it;
* what repeats other files: the hashes in manifest.json, and the encoding of a PNG;
* what is printed. It is kept in log.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
from support.runs import fingerprint, without_timings  # noqa: E402 (found by the line above)

_OF_A_START = ("git", "started", "command")  # keys of environment.json
# The package's own version, in reports and environment.json.
VERSION = re.compile(r"(flowgrpo[-_]rc\"?[ :=\"]+)\d+\.\d+\.\d+")

LOG = "log.txt"  # beside the folders of runs
UNSTABLE_TILES = "training samples per second|peak memory, GiB|measured time"
UNSTABLE_IN_REPORT = re.compile(
    r'<section id="timing">.*?</section>'
    rf"|<div><b>[^<]*</b><small>(?:{UNSTABLE_TILES})</small></div>"
    r"|<tr><th>(?:git|started)</th>.*?</tr>|<dt>Started</dt><dd>.*?</dd>"
    r"|git [0-9a-f]+(?:-dirty)?, ",
    re.DOTALL,
)

# A step has two mini-batches of two micro-batches, and its 96 images warm an `auto` band up. Large
# updates and tight bounds make clips, weights and rejection act.
COMMON = """trainer.total_training_steps=3 trainer.save_freq=1 trainer.max_checkpoints_to_keep=3
    trainer.test_freq=2 trainer.device=cpu rollout.val_kwargs.n=8 actor.ema.enable=true
    actor.ema.update_interval=1 actor.optim.lr=1e-2 actor.ppo_mini_batch_size=4
    trainer.output_dir=run"""
IMAGES = "loss.clip_ratio=1e-4"
TEXT = """--config-name=token_grpo data.train_batch_size=8 actor.ppo_micro_batch_size_per_gpu=16
    actor.token_loss.clip_ratio_low=0.02 actor.token_loss.clip_ratio_high=0.02
    actor.token_loss.clip_ratio_c=1.04 rc.rollout_is_threshold=1.01"""
SECTIONS = {"rc": "algorithm.rollout_correction", "loss": "actor.diffusion_loss"}
DECOUPLED = "rc.bypass_mode=false"
UNJUDGED = f"{DECOUPLED} rc.rollout_rs=null rc.rollout_rs_threshold=null"
TIGHT = "rc.rollout_rs=[token_k1,token_k3,step_kl] rc.rollout_rs_threshold=auto:2"
OWN = f"{DECOUPLED} rc.exclude_rejected=false rc.rollout_is=token rc.rollout_is_threshold=1.0001"
STALE = f"{DECOUPLED} {TIGHT} rollout.staleness=1"
STOP = "trainer.max_time=0.001"  # stops after the first step, with exit code 75
RECORD = "trainer.save_rollouts=true trainer.output_dir=recorded"
# Overrides of each case, with the short names of SECTIONS. THEN is between two commands.
CASES = {
    "bypass_auto": "",
    "bypass_auto_tight": f"{TIGHT} actor.ppo_epochs=2",
    "bypass_window": f"{TIGHT} rc.bypass_level=window rc.rollout_rs=[seq_sum_k1,step_kl]",
    "bypass_reinforce": "rc.preset=bypass_pg_geo_rs_seq_tis rc.rollout_is_threshold=1.0001 "
    "rc.rollout_rs_threshold=0.9998_1.0002",
    "decoupled_seq_is_rs": "rc.preset=decoupled_seq_is_rs rc.rollout_is_threshold=1.0001 "
    "rc.rollout_rs_threshold=0.9995_1.0005",
    "decoupled_auto": f"{DECOUPLED} {TIGHT}",
    "decoupled_auto_own": f"{OWN} {TIGHT}",
    "decoupled_normalize": f"{UNJUDGED} rc.rollout_is=token rc.rollout_is_threshold=1.0001 "
    "rc.rollout_is_batch_normalize=true",
    "decoupled_mask": f"{DECOUPLED} rc.rollout_rs=token_k1 rc.rollout_rs_threshold=0.9997_1.0003 "
    "rc.rollout_is=token rc.rollout_is_mode=mask rc.rollout_is_threshold=0.9998_1.0002 "
    "rc.rollout_token_veto_threshold=0.9996 rc.metric_names=both",
    "decoupled_sum": f"{UNJUDGED} rc.log_prob_scale=sum rc.rollout_is=sequence",
    "guard_bypass": "loss.loss_mode=grpo_guard",
    "guard_decoupled": f"{OWN} loss.loss_mode=grpo_guard",
    "flow_dppo": "loss.loss_mode=flow_dppo",
    "custom_loss": "loss.loss_mode=my_loss.Cispo",
    "kl_loss": "actor.use_kl_loss=true actor.kl_loss_coef=10",
    "guidance": "rollout.pipeline.guidance_scale=2 rollout.algo.window_sharing=sample "
    "rollout.algo.shared_prefix=false model.gradient_checkpointing=true",
    "cps_peers": "rollout.algo.sde_type=cps rollout.algo.log_prob_convention=peers",
    "gdpo": "algorithm.adv_estimator=gdpo reward.terms.jpeg.weight=1.0",
    "fp32_aligned": "rollout.dtype=fp32 rollout.micro_batch_size_per_gpu=null "
    "rollout.merge_lora=false actor.train_n=null actor.steps_per_forward=1 "
    "rollout.algo.shared_prefix=false",
    "mixed_precision": "trainer.mixed_precision=bf16",
    "int4": "rollout.quantization=int4",
    "staleness": "rollout.staleness=1",
    "resume": f"{STOP} THEN ",
    "resume_staleness": f"{STALE} {STOP} THEN {STALE}",
    "replay": f"{RECORD} THEN data.replay_dir=recorded",
    "token_ppo": "rc.loss_type=ppo_clip",
    "token_reinforce": "rc.loss_type=reinforce rc.bypass_mode=true",
    "token_gspo": "actor.token_loss.loss_mode=gspo rc.rollout_rs=seq_mean_k1 "
    "rc.rollout_rs_threshold=0.98_1.02 rc.rollout_token_veto_threshold=0.9",
    "two_processes": "",
    "two_processes_sharded": f"{OWN} {TIGHT} trainer.strategy=fsdp2",
}


def run_case(checkout: Path, out: Path, name: str) -> bool:
    """Trains a case with the package of a checkout; returns whether it came to its end."""
    folder, start = out / name, time.monotonic()
    folder.mkdir(parents=True)
    kind = TEXT if name.startswith("token_") else IMAGES
    processes = 2 if name.startswith("two_") else 1
    for overrides in CASES[name].split("THEN"):
        code = run_command(checkout, folder, f"{kind} {COMMON} {overrides}", processes)
        if code != (75 if STOP in overrides else 0):
            lines = (folder / LOG).read_text().splitlines()[-20:]
            print(f"{name}: FAILED with exit code {code}", *lines, sep="\n    ", flush=True)
            return False
    head = subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True)
    for path in folder.glob("*/environment.json"):
        used = json.loads(path.read_text())["git"]
        assert head.startswith(used), f"the package of {used} was used"
    print(f"{name}: finished in {round(time.monotonic() - start)} s", flush=True)
    return True


def run_command(checkout: Path, folder: Path, overrides: str, processes: int) -> int:
    launcher = [sys.executable]
    if processes > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
        launcher += ["--master_addr=127.0.0.1", f"--master_port={port}"]
    arguments = overrides.split()
    for short, section in SECTIONS.items():
        arguments = [re.sub(rf"^{short}(?=[.=])", section, argument) for argument in arguments]
    # The examples hold the loss of the case `custom_loss`, written for the package beside them.
    path = os.pathsep.join([str(checkout), str(checkout / "examples")])
    with (folder / LOG).open("a") as log:
        return subprocess.call(
            [*launcher, "-m", "flowgrpo_rc.train", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def differences(before: Path, after: Path, roots: Sequence[Path]) -> Iterator[str]:
    """Yields the files in which the folders of a case differ, which two checkouts have left."""
    olds, news = files_of(before), files_of(after)
    yield from (f"{path}: only before" for path in sorted(olds - news))
    yield from (f"{path}: only after" for path in sorted(news - olds))
    for path in sorted(olds & news):
        old, new = read(before / path, str(roots[0])), read(after / path, str(roots[1]))
        if words := [str(key) for key in old | new if old.get(key) != new.get(key)]:
            yield f"{path}: {len(words)} differ, the first is {words[0]}"


def files_of(folder: Path) -> set[str]:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return files - {LOG}


def read(path: Path, checkout: str) -> dict[object, object]:
    """Returns what is compared of a file, by name: JSON texts, lines, digests of tensors."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            texts = (file.metadata() or {}).items()
        tensors = {name: fingerprint({name: tensor}) for name, tensor in load_file(path).items()}
        return {name: text.replace(checkout, "CHECKOUT") for name, text in texts} | tensors
    if path.suffix == ".png":
        with Image.open(path) as image:
            return {"mode": image.mode, "pixels": image.tobytes()}
    # Pages may break a long path anywhere.
    content = path.read_text(encoding="utf-8").replace("<wbr>", "").replace(checkout, "CHECKOUT")
    content = VERSION.sub(r"\1VERSION", content)
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in content.split("\n") if line]
        return {
            f"row {i}, {name}": json.dumps(value)
            for i, row in enumerate(without_timings(rows), 1)
            for name, value in row.items()
        }
    if path.name == "report.html":
        content = UNSTABLE_IN_REPORT.sub("", content).replace("<", "\n<")
    if path.name == "manifest.json":
        content = "\n".join(sorted(json.loads(content)))
    elif path.suffix == ".json":
        known = json.loads(content)
        if path.name == "environment.json":
            known = {key: value for key, value in known.items() if key not in _OF_A_START}
        content = json.dumps(known, indent=1, sort_keys=True)
    return dict(enumerate(content.splitlines(), 1))


def compare_commits(revisions: Sequence[str], names: Sequence[str], jobs: int) -> bool:
    """Trains cases with two revisions in worktrees of their own; returns whether none differs."""
    worktree = ["git", "-C", str(Path(__file__).resolve().parents[2]), "worktree"]
    equal = True
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        checkouts = [Path(folder).resolve() / side for side in ("before", "after")]
        outs = [checkout.with_name(f"{checkout.name}_results") for checkout in checkouts]
        finished = []
        for revision, checkout, out in zip(revisions, checkouts, outs, strict=True):
            print(f"{checkout.name}: {revision}", flush=True)
            subprocess.run([*worktree, "add", "--detach", checkout, revision], check=True)
            try:
                finished.append(list(pool.map(partial(run_case, checkout, out), names)))
            finally:
                subprocess.run([*worktree, "remove", "--force", checkout], check=True)
        for name, *ended in zip(names, *finished, strict=True):
            before, after = (out / name for out in outs)
            found = ["it failed"] if not all(ended) else list(differences(before, after, checkouts))
            verdict = "DIFFERENT" if found else f"equal, {len(files_of(before))} files"
            print(f"{name}: {verdict}", *found, sep="\n    ", flush=True)
            equal = equal and not found
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revisions", nargs=2, metavar="REVISION", help="before and after")
    parser.add_argument("--cases", default=",".join(CASES), help="names with commas (all)")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once (2)")
    arguments = parser.parse_args()
    names = arguments.cases.split(",")
    if not set(names) <= set(CASES):
        parser.error(f"--cases {arguments.cases}: there are {', '.join(CASES)}")
    return int(not compare_commits(arguments.revisions, names, arguments.jobs))


if __name__ == "__main__":
    sys.exit(main())
