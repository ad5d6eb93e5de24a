"""The SDE window: where it may lie, who shares it, and what it depends on."""

import pytest
import torch

from flowgrpo_rc.core.schedule import draw_times, draw_windows, sliding_start, window_bounds

SETTINGS = {"window": (2, 1, 6), "sharing": "group", "seed": 3, "step": 1}


@pytest.mark.parametrize(
    ("num_steps", "size", "bounds", "sde_type", "found"),
    [
        (10, None, None, "sde", (9, 0, 9)),
        (10, None, None, "cps", (9, 0, 9)),
        (10, 2, [0, 5], "sde", (2, 0, 5)),
        (10, None, [2, 5], "dance_sde", (3, 2, 5)),
        (10, 1, [9, 10], "sde", (1, 9, 10)),
        (10, 9, [0, 9], "cps", (9, 0, 9)),
        (2, None, None, "sde", (1, 0, 1)),
    ],
)
def test_bounds(num_steps, size, bounds, sde_type, found):
    assert window_bounds(num_steps, size, bounds, sde_type) == found


@pytest.mark.parametrize(
    ("num_steps", "size", "bounds", "sde_type", "key"),
    [
        (10, 2, [5, 5], "sde", "sde_window_range"),
        (10, 2, [6, 5], "sde", "sde_window_range"),
        (10, 2, [-1, 5], "sde", "sde_window_range"),
        (10, 2, [0, 11], "sde", "sde_window_range"),
        (1, None, None, "sde", "sde_window_range"),
        (10, 2, [0, 10], "cps", "cps"),
        (10, 0, [0, 5], "sde", "sde_window_size"),
        (10, -1, [0, 5], "sde", "sde_window_size"),
        (10, 6, [0, 5], "sde", "sde_window_size"),
        (10, 10, None, "sde", "sde_window_size"),
    ],
)
def test_a_window_that_does_not_fit_names_the_key(num_steps, size, bounds, sde_type, key):
    with pytest.raises(ValueError, match=key):
        window_bounds(num_steps, size, bounds, sde_type)


@pytest.mark.parametrize("sharing", ["batch", "group", "sample"])
def test_windows_are_consecutive_and_inside_the_range(sharing):
    windows = draw_windows(range(40), 5, **SETTINGS | {"window": (3, 1, 6), "sharing": sharing})
    assert windows.shape == (200, 3)
    assert windows.dtype == torch.int64
    assert torch.equal(windows.diff(dim=1), torch.ones(200, 2, dtype=torch.int64))
    assert int(windows.min()) >= 1
    assert int(windows.max()) <= 5


@pytest.mark.parametrize("sharing", ["group", "sample"])
def test_every_start_that_fits_occurs_about_equally_often(sharing):
    starts = draw_windows(range(100), 4, **SETTINGS | {"sharing": sharing})[:, 0]
    counts = torch.bincount(starts, minlength=6)
    assert counts[0] == 0
    assert counts[1:5].min() > 60
    assert counts.sum() == counts[1:5].sum() == 400


def test_who_shares_a_window():
    batch, group, sample = (
        draw_windows(range(30), 4, **SETTINGS | {"sharing": sharing})[:, 0].reshape(30, 4)
        for sharing in ("batch", "group", "sample")
    )
    assert batch.unique().numel() == 1
    assert torch.equal(group, group[:, :1].expand(-1, 4))
    assert group[:, 0].unique().numel() > 1
    assert (sample != sample[:, :1]).any()


@pytest.mark.parametrize("sharing", ["batch", "group", "sample"])
def test_a_slots_window_does_not_depend_on_the_process_that_holds_it(sharing):
    whole = draw_windows(range(8), 3, **SETTINGS | {"sharing": sharing}).reshape(8, 3, 2)
    part = draw_windows([5, 2], 3, **SETTINGS | {"sharing": sharing}).reshape(2, 3, 2)
    assert torch.equal(part, whole[[5, 2]])


@pytest.mark.parametrize("changed", ["seed", "step"])
def test_seed_and_step_change_the_windows(changed):
    before = draw_windows(range(40), 1, **SETTINGS)
    assert torch.equal(before, draw_windows(range(40), 1, **SETTINGS))
    assert not torch.equal(before, draw_windows(range(40), 1, **SETTINGS | {changed: 2}))


@pytest.mark.parametrize(
    ("changed", "starts"),
    [
        ({}, [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1]),
        ({"interval": 1}, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3]),
        ({"first": 3}, [3] * 12),
        ({"size": 1, "first": 1, "interval": 4}, [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]),
    ],
)
def test_where_a_sliding_window_starts(changed, starts):
    """The places are written down by hand, for windows in the steps 0 to 4."""
    settings = {"size": 2, "first": 0, "last": 5, "interval": 2} | changed
    assert [sliding_start(step, **settings) for step in range(1, 13)] == starts


def test_the_noise_levels_of_a_sample_are_different_and_all_occur() -> None:
    times = draw_times(range(60), 5, 3)
    assert times.shape == (60, 3)
    assert all(len(set(row)) == 3 for row in times.tolist())
    assert torch.bincount(times.flatten(), minlength=5).min() > 20
    assert torch.equal(draw_times(range(60), 5, None)[:, :3], times)
