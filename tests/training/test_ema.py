"""The average of the weights, and its reversal."""

from __future__ import annotations

import torch
from support.updates import make_update

from flowgrpo_rc.models.base import FlowModel
from flowgrpo_rc.training.config import ActorConfig, EMAConfig, OptimConfig
from flowgrpo_rc.training.ema import averaged_weights


def test_average_and_its_reversal(model: FlowModel) -> None:
    actor = ActorConfig(
        ppo_micro_batch_size_per_gpu=4, optim=OptimConfig(lr=1e-3), ema=EMAConfig(update_interval=2)
    )
    update, batch = make_update(model, actor)
    values = []
    for _ in range(4):
        update.run(batch, 4)
        values.append({name: tensor.clone() for name, tensor in update.lora_state().items()})
    before = update.lora_state()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    with averaged_weights(update.ema, update.parameters):
        for name, average in update.lora_state().items():
            # The first average takes the value, the second moves by 1 - 2 / 11.
            first = values[1][name]
            second = values[3][name]
            torch.testing.assert_close(average, first + (1 - 2 / 11) * (second - first))
    assert all(torch.equal(kept[name], tensor) for name, tensor in update.lora_state().items())
