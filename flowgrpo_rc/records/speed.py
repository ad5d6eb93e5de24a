"""Notices steps that are much slower than those before them, and says what to do."""

from collections.abc import Mapping
from statistics import median

SPEED = "perf/samples_per_second"
_SLOW = 3.0  # how many times slower than the median
_LEAST = 3  # steps before a median is taken
_PHASES = "timing_s/"
_WHOLE = f"{_PHASES}step"
_WAIT = f"{_PHASES}reward_wait"


class SpeedWatch:
    """Compares each step with the steps that this command has taken."""

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = num_threads  # of the process on the CPU; None for a GPU
        self._rows: list[Mapping[str, float]] = []
        self._is_slow = False

    def notice(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Returns what to tell the user when steps begin to be slow; None otherwise."""
        if SPEED not in metrics:
            return None
        earlier = self._rows
        was_slow = self._is_slow
        self._rows = [*earlier, metrics]
        if len(earlier) < _LEAST:
            return None
        usual = median(row[SPEED] for row in earlier)
        self._is_slow = metrics[SPEED] * _SLOW < usual
        if was_slow or not self._is_slow:
            return None
        phase, seconds, before = _slowest(metrics, earlier)
        # Two digits, without an exponent.
        speeds = [f"{float(f'{speed:.2g}'):g}" for speed in (metrics[SPEED], usual)]
        return (
            f"slow: step {step} made {speeds[0]} samples/s, less than a third of the median of "
            f"this run, {speeds[1]}. Most of it went into {phase} ({seconds:.1f} s, before "
            f"{before:.1f} s). {self._advice(phase)}"
        )

    def _advice(self, phase: str) -> str:
        if phase == _WAIT:
            return "Look after the reward: its server, or its share of this machine."
        if self._num_threads is None:
            return "See whether another program uses the GPU or the cores."
        if self._num_threads == 1:
            return "See whether another program uses the cores."
        return (
            "If another program uses a core, the threads of this one wait for each other: Ctrl-C "
            "saves, and the same command goes on, with OMP_NUM_THREADS=1 in front or with "
            "trainer.num_processes=auto."
        )


def _slowest(
    metrics: Mapping[str, float], earlier: list[Mapping[str, float]]
) -> tuple[str, float, float]:
    """Returns the phase that took most time beyond its median, its time and the median."""
    usual = {
        name: median(row.get(name, 0.0) for row in earlier)
        for name in metrics
        if name.startswith(_PHASES)
    }
    phases = [name for name in usual if name != _WHOLE] or [_WHOLE]
    phase = max(phases, key=lambda name: metrics[name] - usual[name])
    return phase, metrics[phase], usual[phase]
