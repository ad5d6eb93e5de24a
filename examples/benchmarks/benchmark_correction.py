"""Time, memory and host transfers of the rollout correction beside verl 0.9.1, in one process and
one run.

    python examples/benchmarks/benchmark_correction.py --install [FOLDER] [--rounds 15]

Both get the same float32 log-probs and int64 mask of right-padded responses, and the same settings:
token weights and two rejection criteria. `--install` fetches verl by name from PyPI into FOLDER, or
into a temporary folder; without it verl must be importable (`PYTHONPATH=FOLDER` uses an earlier
installation). Nothing of verl is stubbed or patched.

Time: rounds alternate (theirs, ours, theirs, ...); the ratio is that of the medians. The first
rounds warm up.
Memory: every allocation and release that torch's profiler records during one call, summed in order
of time; the peak of that sum is what the call adds to its inputs. Results count, and so do the
temporaries inside an operator.
Host transfers: what would make the host wait for a GPU. The profiler records `_local_scalar_dense`
(`item`, `float`, `int`, `bool` and every other use of a tensor as a Python number, in Python and in
C++ alike) and operators whose result has a size that depends on the data. `tolist`, `numpy` and
`cpu` do no such thing for a tensor on the CPU and are counted as they are called.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own messages

import torch
from parity_vectors import install
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from flowgrpo_rc import compute_rollout_correction_and_rejection_mask as ours

VERSION = "0.9.1"
WARM_UP = 3
SETTINGS: dict[str, Any] = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "0.5_2.0,0.01",
}
WAITING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal")
COPYING = ("tolist", "numpy", "cpu")
Correct = Callable[..., Any]
Inputs = tuple[Tensor, Tensor, Tensor]


class Cost(NamedTuple):
    """The cost of one call. Memory of the peak and of the results is in MiB beyond the inputs."""

    peak: float
    results: float
    transfers: int


def make_inputs(rows: int, columns: int) -> Inputs:
    """Returns log-probs of two implementations, and a mask.

    They differ by 0.02, one token in a hundred by 1; responses have any length from an eighth of
    the longest; the padding holds arbitrary numbers.
    """
    source = torch.Generator().manual_seed(0)
    rollout = -torch.empty(rows, columns).exponential_(2.0, generator=source)
    outliers = torch.rand(rows, columns, generator=source) < 0.01
    scale = torch.where(outliers, 1.0, 0.02)
    old = rollout + scale * torch.randn(rows, columns, generator=source)
    lengths = torch.randint(columns // 8, columns + 1, (rows, 1), generator=source)
    return old, rollout, (torch.arange(columns) < lengths).long()


@contextmanager
def counted_copies() -> Iterator[list[str]]:
    """Collects the names of COPYING that are called on tensors while the context is open."""
    calls: list[str] = []
    originals = {name: getattr(Tensor, name) for name in COPYING}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return originals[name](*args, **options)

        return call

    for name in COPYING:
        setattr(Tensor, name, counting(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


def cost(call: Callable[[], Any]) -> Cost:
    with (
        counted_copies() as copies,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        result = call()
    events = profiler.profiler.kineto_results.events()
    live = peak = 0
    for _, num_bytes in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        live += num_bytes
        peak = max(peak, live)
    del result
    waits = sum(event.name() in WAITING for event in events)
    return Cost(peak / 2**20, live / 2**20, waits + len(copies))


def seconds(correct: Correct, inputs: Inputs) -> float:
    start = time.perf_counter()
    correct(*inputs, **SETTINGS)
    return time.perf_counter() - start


def agreement(theirs: Correct, inputs: Inputs) -> str:
    """Returns how far the weights of both are apart, and in how many steps their masks differ."""
    proto, mask, _ = theirs(*inputs, **SETTINGS)
    found = ours(*inputs, **SETTINGS)
    weights = proto.batch["rollout_is_weights"]
    apart = (found.weights - weights).abs().max()
    different = (found.mask != mask).sum()
    return (
        f"weights agree to {apart:.0e}; masks differ in {different} of {mask.numel()} steps, "
        f"{mask.sum()} are kept"
    )


def compare(theirs: Correct, inputs: Inputs, rounds: int) -> None:
    pairs = [(seconds(theirs, inputs), seconds(ours, inputs)) for _ in range(WARM_UP + rounds)][
        WARM_UP:
    ]
    their_time, our_time = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(one / other for one, other in pairs)
    their_cost, our_cost = (
        cost(partial(correct, *inputs, **SETTINGS)) for correct in (theirs, ours)
    )
    shape = list(inputs[0].shape)
    print(
        f"{shape} float32, {torch.get_num_threads()} torch threads, torch {torch.__version__}, "
        f"{rounds} rounds"
    )
    print(f"{'':20}{'verl ' + metadata.version('verl'):>14}{'flowgrpo_rc':>14}{'ratio':>9}")
    print(
        f"{'time, median':20}{their_time * 1e3:11.1f} ms{our_time * 1e3:11.1f} "
        f"ms{their_time / our_time:9.2f}"
    )
    print(
        f"{'memory, peak':20}{their_cost.peak:10.1f} MiB{our_cost.peak:10.1f} "
        f"MiB{their_cost.peak / our_cost.peak:9.2f}"
    )
    print(f"{'  of it results':20}{their_cost.results:10.1f} MiB{our_cost.results:10.1f} MiB")
    print(f"{'host transfers':20}{their_cost.transfers:14}{our_cost.transfers:14}")
    print(
        f"time ratio of single rounds: {ratios[0]:.2f} to {ratios[-1]:.2f}; "
        f"{agreement(theirs, inputs)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--install", nargs="?", const="", metavar="FOLDER", help="fetch verl by name, from PyPI"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of torch; its own choice by default")
    parser.add_argument("--shape", type=int, nargs=2, default=(512, 4096), metavar=("B", "T"))
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with (
        tempfile.TemporaryDirectory()
        if arguments.install == ""
        else nullcontext(arguments.install) as folder
    ):
        if folder is not None:
            install(VERSION, folder)
            sys.path.insert(0, folder)
        if find_spec("verl") is None:
            print(f"verl is not installed: --install [FOLDER] fetches version {VERSION}")
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            helper = import_module("verl.trainer.ppo.rollout_corr_helper")
        compare(
            helper.compute_rollout_correction_and_rejection_mask,
            make_inputs(*arguments.shape),
            arguments.rounds,
        )


if __name__ == "__main__":
    main()
