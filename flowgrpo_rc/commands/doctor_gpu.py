"""`flowgrpo-rc doctor --gpu`: what a card can do of what a run asks for, in a few minutes.

Each check also runs where there is no GPU, on what there is.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed, multiprocessing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flowgrpo_rc.config.check_engine import missing_for_compiling
from flowgrpo_rc.config.compose import config_folder
from flowgrpo_rc.config.machine import device_named
from flowgrpo_rc.libraries import quiet
from flowgrpo_rc.models.architecture import build_architecture, unpack_architecture
from flowgrpo_rc.models.config import ModelConfig
from flowgrpo_rc.plugins import install_hint
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.rollout.devices import AUTO

TIMEOUT_S = 900.0
# A job of two steps on the bundled model, whose reward takes no time.
JOB = (
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.logger=[]",
    "trainer.num_processes=1",
    "data.train_batch_size=4",
    "rollout.n=8",
    "actor.train_n=null",
    "rollout.micro_batch_size_per_gpu=null",
    "actor.ppo_micro_batch_size_per_gpu=8",
    "reward.terms.ocr=null",
    "reward.terms.jpeg.weight=1.0",
)
_FLOOR = "actor/rollout_corr/logprob_abs_diff_mean"
_LARGEST = "actor/rollout_corr/logprob_abs_diff_max"
_OVER_EXPECTED = "actor/rollout_corr/mismatch_over_expected"
_FAILED = (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException)
_ROUNDING = 1e-5  # nats; fp32 log-probs of the same weights differ by less
_FAULT = 2.0  # mismatch over what the precisions explain


class Finding(NamedTuple):
    """Says in words what a check has found, and what to do about it."""

    state: str  # ok, slow, broken or skipped
    found: str
    advice: str = ""


Check = Callable[[], Finding]


def gpu_checks(device: torch.device) -> list[tuple[str, Check]]:
    """Returns the checks of a device by name, the quick ones first."""
    no_compiler = "no compiler" if missing_for_compiling(device) else ""
    no_torchao = "" if find_spec("torchao") else f"needs torchao: {install_hint('quantization')}"
    return [
        ("GPU", partial(check_device, device)),
        ("memory", partial(check_memory, device)),
        ("compilers", partial(check_compilers, device)),
        ("attention", partial(check_attention, device)),
        ("processes", partial(check_processes, device)),
        ("decoding", partial(check_decoding, device, 512 if device.type == "cuda" else 128)),
        ("fp32 rollout", check_fp32),
        ("bf16 rollout", check_rollout),
        ("int8 rollout", partial(check_rollout, "rollout.quantization=int8", lacking=no_torchao)),
        ("compiled rollout", partial(check_rollout, "rollout.compile=true", lacking=no_compiler)),
    ]


def check_device(device: torch.device) -> Finding:
    """Names the device, its driver and what torch is built for."""
    if device.type != "cuda":
        device_named(AUTO)  # a driver that torch cannot use is an error
        advice = "install the driver and a torch for CUDA to train on a GPU"
        return Finding("skipped", f"none: torch {torch.__version__} uses the CPU", advice)
    major, minor = torch.cuda.get_device_capability(device)
    found = (
        f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}, capability "
        f"{major}.{minor}, torch {torch.__version__} for CUDA {torch.version.cuda}"
    )
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return Finding("slow", found, "it has no bf16: set rollout.dtype=fp16")
    return Finding("ok", found)


def check_memory(device: torch.device) -> Finding:
    """Tells how much of the memory is free."""
    if device.type != "cuda":
        return Finding("skipped", "no GPU")
    free, total = torch.cuda.mem_get_info(device)
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
    if free < 0.9 * total:
        return Finding("slow", found, "other programs use this GPU; nvidia-smi names them")
    return Finding("ok", found)


def check_compilers(device: torch.device) -> Finding:
    """Looks for what torch.compile needs, and compiles a function."""
    lacking = missing_for_compiling(device)
    if lacking:
        advice = "rollout.compile and actor.optim.name=adamw_8bit need them"
        return Finding("broken", f"missing: {' and '.join(lacking)}", advice)
    compiled: Any = torch.compile(torch.nn.functional.silu)
    x = torch.ones(64, device=device)
    torch.testing.assert_close(compiled(x), torch.nn.functional.silu(x))
    return Finding("ok", "torch.compile works")


def check_attention(device: torch.device) -> Finding:
    """Runs each kernel of attention forward and backward, twice, in bf16."""
    works, differs = [], []
    for backend in SDPBackend.__members__.values():
        if backend.name in ("ERROR", "OVERRIDEABLE"):
            continue
        try:
            first, second = (_attention_gradient(device, backend) for _ in range(2))
        except RuntimeError:
            continue
        name = backend.name.removesuffix("_ATTENTION").lower()
        works.append(name)
        if not torch.equal(first, second):
            differs.append(name)
    found = f"kernels that work: {', '.join(works)}"
    if differs:
        found += f"; gradients differ from call to call: {', '.join(differs)}"
    if device.type == "cuda" and works == ["math"]:
        return Finding("slow", found, "install a torch that is built for this GPU")
    advice = "set trainer.deterministic=true where a run has to repeat bit for bit"
    return Finding("ok", found, advice if differs else "")


def _attention_gradient(device: torch.device, backend: SDPBackend) -> torch.Tensor:
    torch.manual_seed(0)
    shape = (2, 4, 512, 64)
    query, key, value = (
        torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    )
    with sdpa_kernel([backend]):
        scaled_dot_product_attention(query, key, value).float().square().sum().backward()
    assert query.grad is not None
    return query.grad


def check_processes(device: torch.device) -> Finding:
    """Adds a tensor over as many processes as there are GPUs, or over two on the CPU."""
    count = torch.cuda.device_count() if device.type == "cuda" else 2
    if count < 2:
        return Finding("skipped", "a single GPU")
    advice = "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 goes around a broken link"
    end = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryDirectory() as folder:
        given = (count, device.type, folder)
        children = multiprocessing.spawn(_add_over_processes, given, nprocs=count, join=False)
        try:
            while not children.join(timeout=1):
                if time.monotonic() > end:
                    return Finding("broken", f"{count} processes wait for each other", advice)
        except _FAILED as error:
            return Finding("broken", _last_line(str(error)), advice)
        finally:
            for child in children.processes:
                child.kill()
        return Finding("ok", Path(folder, "found").read_text())


def _add_over_processes(rank: int, count: int, device_type: str, folder: str) -> None:
    """Is one of the processes of `check_processes`."""
    device = torch.device("cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    if device_type == "cuda":
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=count,
    )
    numbers = torch.full((2**24,), float(rank), device=device)
    distributed.all_reduce(torch.zeros(1, device=device))
    start = time.perf_counter()
    distributed.all_reduce(numbers)
    total = numbers[-1].item()  # waits for the device, too
    seconds = time.perf_counter() - start
    if total != count * (count - 1) / 2:
        raise RuntimeError(f"the sum of {count} processes is wrong: {total}")
    if rank == 0:
        how = f"over {distributed.get_backend()} in {1e3 * seconds:.1f} ms"
        Path(folder, "found").write_text(f"{count} processes added 64 MiB {how}")
    distributed.destroy_process_group()


def check_decoding(device: torch.device, pixels: int) -> Finding:
    """Decodes an image of a published size with SD3.5-medium's VAE and random weights."""
    file = config_folder() / "architectures" / "stable-diffusion-3.5-medium.json"
    with quiet("diffusers", "transformers"):
        vae: Any = build_architecture(ModelConfig(path=str(unpack_architecture(file)))).pipeline.vae
    vae.to_empty(device=device)
    for parameter in vae.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    channels = vae.config.latent_channels
    latents = torch.zeros(1, channels, pixels // 8, pixels // 8, device=device)
    with torch.no_grad():
        vae.decode(latents[..., :8, :8])  # what the first call alone does is not counted
        start = time.perf_counter()
        image = vae.decode(latents).sample
        finite = bool(image.isfinite().all())
    seconds = time.perf_counter() - start
    if not finite or image.shape[-1] != pixels:
        return Finding("broken", f"the image is {tuple(image.shape)}, finite: {finite}")
    found = f"{1e3 * seconds:.0f} ms an image of {pixels} x {pixels} in fp32"
    if device.type == "cuda":
        found += f", peak {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"
    return Finding("ok", found)


def check_fp32() -> Finding:
    """Samples and trains the bundled model in fp32, in forwards of the same sizes."""
    row = _job(
        "rollout.dtype=fp32",
        "actor.replay=aligned",
        "actor.steps_per_forward=1",
        "rollout.micro_batch_size_per_gpu=4",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "rollout.algo.shared_prefix=false",
    )
    largest = row[_LARGEST]
    if largest == 0:
        return Finding("ok", f"replayed bit for bit, {_pace(row)}")
    found = f"replayed log-probs differ by up to {largest:.1e} nats, {_pace(row)}"
    if largest < _ROUNDING:
        return Finding("ok", found, "kernels of this device do not repeat bit for bit")
    return Finding("broken", found, "attach the file of --out to an issue")


def check_rollout(*overrides: str, lacking: str = "") -> Finding:
    """Samples the bundled model in bf16 with some settings, unless a package or tool is lacking."""
    if lacking:
        return Finding("skipped", lacking)
    return _mismatch(_job("rollout.dtype=bf16", *overrides))


def _mismatch(row: Mapping[str, float]) -> Finding:
    """Judges the log-probs of a job, whose rollout has another precision than its trainer."""
    found = f"mean mismatch {row[_FLOOR]:.1e} nats, {_pace(row)}"
    over = row.get(_OVER_EXPECTED)
    if over is None:
        return Finding("ok", found)
    found += f"; {over:.2f} of what the precision explains"
    advice = "a fault of the engine, not rounding: `flowgrpo-rc calibrate` looks for its cause"
    return Finding("broken", found, advice) if over > _FAULT else Finding("ok", found)


def _pace(row: Mapping[str, float]) -> str:
    return f"{row['perf/samples_per_second']:.1f} samples a second"


def _job(*overrides: str) -> Mapping[str, float]:
    """Returns the metrics of the second step of a job, which a process of its own trains."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*JOB, *overrides, f"trainer.output_dir={folder}/run"]
        command = [sys.executable, "-m", "flowgrpo_rc.train", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(_last_line(done.stderr))
        return MetricsFile(Path(folder, "run", "metrics.jsonl")).numbers()[-1]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
