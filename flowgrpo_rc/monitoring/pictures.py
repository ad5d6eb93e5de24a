"""Measures what the pictures of a step look like, beside those with which the run began.

A policy that has found a weakness of its reward shows it in the pictures: they turn into grids,
into glaring colours, or all into one picture, while the reward rises. Some plain statistics see
that, for much less than a KL to the base model costs.

Shapes: N pictures, F frames of a video, H x W pixels, K statistics, C = 192 colours of a thumbnail.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowgrpo_rc.core.metrics import MetricBag, std_from_moments

STATISTICS = ("brightness", "saturation", "contrast", "edges", "fine_detail")
DIVERSITY = "diversity"
SIDE = 256  # pixels; of a larger picture, its middle is measured
CELLS = 8  # a thumbnail has so many cells in a row and in a column
BASE_PROMPTS = 8  # the least that the base consists of
# Spreads below it count as it: a run may begin with pictures that are all alike.
LEAST_SPREAD = 0.01
_REWARD = "reward/mean"
# Name of a mean -> name of its standard deviation.
_SPREADS = {f"pictures/{name}": f"pictures/{name}_std" for name in (*STATISTICS, DIVERSITY)}
_SPREADS[_REWARD] = "reward/std"
_LUMA = (0.299, 0.587, 0.114)  # of red, green and blue, as in ITU-R BT.601


class PictureFacts(NamedTuple):
    """Holds what is kept of pictures, in float64."""

    statistics: Tensor  # those of `STATISTICS`, each from 0 to 1, [N, K]
    colours: Tensor  # mean colours of `CELLS` x `CELLS` cells, [N, C]

    @classmethod
    def of(cls, samples: np.ndarray) -> "PictureFacts":
        """Measures images [N, H, W, 3], or three frames of videos [N, F, H, W, 3]; uint8."""
        if samples.ndim == 4:
            return cls(_statistics(samples), _colours(samples))
        last = samples.shape[1] - 1
        frames = [cls.of(samples[:, frame]) for frame in (0, last // 2, last)]
        return cls(*(torch.stack(columns).mean(0) for columns in zip(*frames, strict=True)))

    @classmethod
    def join(cls, chunks: "Sequence[PictureFacts]") -> "PictureFacts":
        """Joins the facts of several chunks, in order."""
        return cls(*(torch.cat(columns) for columns in zip(*chunks, strict=True)))


def observe_pictures(facts: PictureFacts, group: Tensor) -> MetricBag:
    """Reports each statistic under `pictures/`, with its standard deviation as `NAME_std`.

    `diversity` is how far the pictures of one prompt differ: the standard deviation of a cell's
    colour over the group, as root mean square over cells and channels. Groups [N] are whole.
    """
    metrics = MetricBag()
    columns = dict(zip(STATISTICS, facts.statistics.unbind(1), strict=True))
    colours_of_groups = [facts.colours[group == index] for index in group.unique().tolist()]
    columns[DIVERSITY] = torch.stack(
        [colours.var(0, correction=0).mean().sqrt() for colours in colours_of_groups]
    )
    for name, values in columns.items():
        mean = f"pictures/{name}"
        square = f"pictures/_{name}_square"
        metrics.mean(mean, values)
        metrics.mean(square, values**2)
        metrics.derive(f"pictures/{name}_std", (mean, square), std_from_moments)
    metrics.sum("pictures/prompts", torch.tensor(len(columns[DIVERSITY])))
    return metrics


class PictureWatch:
    """Compares the pictures of a step with those of the first step, which the base model made.

    The LoRA of a new run changes nothing before the first update. Where a run begins with a LoRA
    from a file, the pictures of that one are the base. A step of few prompts says little about how
    much pictures differ, so the base is of as many steps as it takes to have `BASE_PROMPTS`.
    """

    def __init__(self) -> None:
        self._prompts = 0.0
        self._sums: dict[str, float] = {}  # of a mean, and of a mean square as NAME_square
        self._base: dict[str, float] = {}

    def compare(self, metrics: Mapping[str, float | None]) -> dict[str, float]:
        """Measures how far pictures and reward have moved; the first steps are the base.

            drift = max_k |mean_k - base mean_k| / max(base std_k, LEAST_SPREAD)
            reward_gain = (mean reward - base mean) / base std

        The gain is missing if the rewards of the base are all equal; both, if the step has no
        pictures, or if it belongs to the base.
        """
        moments = {
            name: value
            for name, value in metrics.items()
            if name.startswith("pictures/") or name in (_REWARD, "reward/std")
            if value is not None and math.isfinite(value)
        }
        if "pictures/prompts" not in moments:
            return {}
        if self._prompts < BASE_PROMPTS:
            self._extend(moments)
            return {}
        movement = {"pictures/drift": max(self._moved(moments).values())}
        spread = self._base.get("reward/std", 0.0)
        if spread > 0 and _REWARD in moments:
            movement["pictures/reward_gain"] = (moments[_REWARD] - self._base[_REWARD]) / spread
        return movement

    def most_moved(self, metrics: Mapping[str, float | None]) -> str:
        """Returns the name of the statistic that is farthest from the base."""
        moved = self._moved({name: value for name, value in metrics.items() if value is not None})
        return max(moved, key=lambda name: moved[name])

    def _extend(self, moments: Mapping[str, float]) -> None:
        """Takes the moments of a step into the base, weighted by its prompts."""
        prompts = moments["pictures/prompts"]
        for name, spread in _SPREADS.items():
            if name in moments and spread in moments:
                square = moments[name] ** 2 + moments[spread] ** 2
                for key, value in ((name, moments[name]), (f"{name}_square", square)):
                    self._sums[key] = self._sums.get(key, 0.0) + prompts * value
        self._prompts += prompts
        for name, spread in _SPREADS.items():
            if name in self._sums:
                square = self._sums[f"{name}_square"] / self._prompts
                self._base[name] = self._sums[name] / self._prompts
                self._base[spread] = std_from_moments(self._base[name], square)

    def _moved(self, moments: Mapping[str, float]) -> dict[str, float]:
        return {
            name: abs(moments[name] - self._base[name]) / max(self._base[spread], LEAST_SPREAD)
            for name, spread in _SPREADS.items()
            if name != _REWARD and name in moments and name in self._base
        }

    def state_dict(self) -> dict[str, object]:
        """Returns the base; JSON can hold it."""
        return {"prompts": self._prompts, "sums": dict(self._sums), "base": dict(self._base)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to what `state_dict` returned."""
        self._prompts = float(state["prompts"])
        self._sums = {name: float(value) for name, value in state["sums"].items()}
        self._base = {name: float(value) for name, value in state["base"].items()}


def _statistics(images: np.ndarray) -> Tensor:
    """Measures images [N, H, W, 3] uint8; returns [N, K].

    Saturation is that of HSV. Edges are the mean difference of neighbours, fine detail is the root
    mean square of what one pixel differs from the mean of its four neighbours.
    """
    height, width = images.shape[1:3]
    top = max(0, height - SIDE) // 2
    left = max(0, width - SIDE) // 2
    middle = images[:, top : top + SIDE, left : left + SIDE]
    red, green, blue = np.moveaxis(middle, -1, 0).astype(np.float32, order="C") / 255
    high = np.maximum(np.maximum(red, green), blue)
    low = np.minimum(np.minimum(red, green), blue)
    luma = sum(share * channel for share, channel in zip(_LUMA, (red, green, blue), strict=True))
    luma = np.pad(luma, ((0, 0), (1, 1), (1, 1)), mode="edge")
    inner = luma[:, 1:-1, 1:-1]
    below = luma[:, 2:, 1:-1]
    right = luma[:, 1:-1, 2:]
    around = (luma[:, :-2, 1:-1] + below + luma[:, 1:-1, :-2] + right) / 4
    columns = (
        inner.mean((1, 2)),
        ((high - low) / np.maximum(high, 1 / 255)).mean((1, 2)),
        inner.std((1, 2)),
        (np.abs(below - inner) + np.abs(right - inner)).mean((1, 2)) / 2,
        np.sqrt(((inner - around) ** 2).mean((1, 2))),
    )
    return torch.from_numpy(np.stack(columns, axis=1)).double()


def _colours(images: np.ndarray) -> Tensor:
    """Averages images [N, H, W, 3] uint8 over cells; returns [N, C]."""
    # Of a large picture every so many pixels are enough for a mean.
    stride = max(1, min(images.shape[1:3]) // SIDE)
    pixels = torch.from_numpy(np.ascontiguousarray(images[:, ::stride, ::stride]))
    cells = torch.nn.functional.adaptive_avg_pool2d(pixels.permute(0, 3, 1, 2).float(), CELLS)
    return (cells.double() / 255).flatten(1)
