"""Which GPUs the workers of a run get, and when Ray may be asked."""

from __future__ import annotations

import socket

import pytest

from flowgrpo_rc.workers.cluster import check_reachable, spare_gpus


@pytest.mark.parametrize(
    ("visible", "trainers", "workers", "share", "expected"),
    [
        (["0", "1", "2", "3"], 2, 2, 1, "2,3"),
        (["4", "7", "GPU-a"], 1, 4, 0.5, "7,GPU-a"),
        (["0", "1", "2"], 1, 1, 2, "1,2"),
        (["0"], 0, 1, 1, "0"),
        (["0"], 1, 9, 0, None),
        ([], 0, 2, 0, None),
    ],
)
def test_workers_get_the_gpus_that_no_trainer_uses(
    visible: list[str], trainers: int, workers: int, share: float, expected: str | None
) -> None:
    assert spare_gpus(visible, trainers, workers, share) == expected


@pytest.mark.parametrize(
    ("visible", "trainers", "workers", "share", "needed"),
    [(["0", "1"], 1, 2, 1, 2), ([], 0, 1, 1, 1), (["0", "1", "2"], 1, 3, 0.6, 3)],
)
def test_too_few_gpus_are_an_error(
    visible: list[str], trainers: int, workers: int, share: float, needed: int
) -> None:
    words = rf"need {needed}, and of {len(visible)} GPUs here {trainers} train"
    with pytest.raises(ValueError, match=words):
        spare_gpus(visible, trainers, workers, share)


def test_an_address_is_tried() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}")
    check_reachable("auto")
    with pytest.raises(ValueError, match=r"rollout\.ray_address=there cannot be reached"):
        check_reachable("there")
    with pytest.raises(ValueError, match=r"rollout\.ray_address=127\.0\.0\.1:99999 cannot be"):
        check_reachable("127.0.0.1:99999")
