"""Batches as plain tensors and back, conditioning with images included."""

from __future__ import annotations

import torch
from support.builders import diffusion_batch
from support.image_rollouts import make_spec

from flowgrpo_rc.batch import Conditioning, DiffusionBatch
from flowgrpo_rc.records.packed_batch import pack, unpack


def test_sizes_of_images_come_back_with_their_tokens() -> None:
    sizes = (((2, 3), (1, 1)), ((1, 4),))
    conditioning = Conditioning(
        embeds=torch.rand(2, 5, 3), images=torch.rand(2, 7, 4), image_sizes=sizes
    )
    batch = diffusion_batch(torch.rand(2, 1)).replace(
        spec=make_spec("sde", 1.0, condition_images=2, condition_pixels=4096),
        conditioning=conditioning,
        prompt_index=torch.tensor([1, 0]),
    )
    packed = pack(batch)
    padded = [[[2, 3], [1, 1]], [[1, 4], [0, 0]]]
    assert packed.tensors["conditioning.image_sizes"].tolist() == padded
    unpacked = unpack(packed)
    assert isinstance(unpacked, DiffusionBatch)
    assert unpacked.spec == batch.spec
    assert unpacked.conditioning.image_sizes == sizes
    assert torch.equal(unpacked.conditioning.images, conditioning.images)
    assert unpacked.conditioning[torch.tensor([1, 1])].image_sizes == (sizes[1], sizes[1])
    without = batch.replace(conditioning=Conditioning(embeds=conditioning.embeds))
    assert "conditioning.image_sizes" not in pack(without).tensors
    assert unpack(pack(without)).conditioning.image_sizes == ()
