"""Which GPUs the workers of a run get, and when Ray may be asked."""

from __future__ import annotations

import socket

import pytest

from flowgrpo_rc.workers.cluster import check_reachable, spare_gpus


def test_workers_get_the_gpus_that_no_trainer_uses() -> None:
    assert spare_gpus(["0", "1", "2", "3"], 2, 2) == "2,3"
    assert spare_gpus(["4", "7", "GPU-a"], 1, 1.5) == "7,GPU-a"
    assert spare_gpus(["0"], 0, 1) == "0"
    assert spare_gpus(["0"], 1, 0) is None
    assert spare_gpus([], 0, 0) is None


@pytest.mark.parametrize(("visible", "trainers"), [(["0", "1"], 1), ([], 0)])
def test_too_few_gpus_are_an_error(visible: list[str], trainers: int) -> None:
    words = rf"ask for 2 GPUs .* of {len(visible)} GPUs here {trainers} train"
    with pytest.raises(ValueError, match=words):
        spare_gpus(visible, trainers, 2)


def test_an_address_is_tried() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}")
    check_reachable("auto")
    with pytest.raises(ValueError, match=r"rollout\.ray_address=there cannot be reached"):
        check_reachable("there")
