"""Which GPUs the workers of a run get, and when Ray may be asked."""

from __future__ import annotations

import socket

import pytest
import torch

from flowgrpo_rc.workers.cluster import check_reachable, spare_gpus


@pytest.mark.parametrize(
    ("visible", "device", "trainers", "workers", "share", "expected"),
    [
        ("0,1,2,3", "cuda", 2, 2, 1, "2,3"),
        ("4,7,GPU-a", "cuda", 1, 4, 0.5, "7,GPU-a"),
        ("0,1,2", "cuda", 1, 1, 2, "1,2"),
        ("0", "cpu", 1, 1, 1, "0"),
        ("0", "cuda", 1, 9, 0, None),
        ("", "cpu", 1, 2, 0, None),
    ],
)
def test_workers_get_the_gpus_that_no_trainer_uses(
    monkeypatch, visible, device, trainers, workers, share, expected
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert spare_gpus(torch.device(device), trainers, workers, share) == expected


@pytest.mark.parametrize(
    ("visible", "device", "trainers", "workers", "share", "words"),
    [
        ("0,1", "cuda", 1, 2, 1, "need 2, and of 2 GPUs here 1 train"),
        ("0", "cpu", 1, 2, 1, "need 2, and of 1 GPUs here 0 train"),
        ("0,1,2", "cuda", 1, 3, 0.6, "need 3, and of 3 GPUs here 1 train"),
    ],
)
def test_too_few_gpus_are_an_error(monkeypatch, visible, device, trainers, workers, share, words):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match=words):
        spare_gpus(torch.device(device), trainers, workers, share)


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
