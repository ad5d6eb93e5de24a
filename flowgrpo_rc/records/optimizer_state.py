"""The optimizer's state as plain tensors by name, as a checkpoint holds it."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flowgrpo_rc.records.checkpoint import CheckpointError

_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, beside the number of its updates, `step`


def schedule_state(schedule: LRScheduler) -> dict[str, object]:
    """Returns the state of a schedule; JSON can hold it."""
    return schedule.state_dict() | {"_last_lr": [float(rate) for rate in schedule.get_last_lr()]}


def load_schedule(schedule: LRScheduler, state: Mapping[str, object]) -> None:
    """Goes back to `state`, with the learning rate of the optimizer."""
    schedule.load_state_dict(dict(state))
    for group, rate in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def optimizer_tensors(optimizer: Optimizer, named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Returns the state as plain tensors.

    A tensor is named `parameter.key`; a moment of 8 bits is several, `parameter.key.component`.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            tensors |= {
                f"{name}.{key}{suffix}": tensor for suffix, tensor in _components(value).items()
            }
    return tensors


def load_optimizer(
    optimizer: Optimizer, named: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Goes back to what `optimizer_tensors` returned; CheckpointError for another shape."""
    for name, parameter in named.items():
        prefix = f"{name}."
        names = [key for key in tensors if key.startswith(prefix)]
        stored = {key.removeprefix(prefix): tensors[key] for key in names}
        keys = dict.fromkeys(key.partition(".")[0] for key in stored)
        state = {key: _joined(key, stored, parameter) for key in keys}
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        if shapes not in ({}, {"step": (), **dict.fromkeys(_MOMENTS, tuple(parameter.shape))}):
            raise CheckpointError(
                f"optimizer.safetensors of the checkpoint: the state of {name} is {shapes}, "
                f"this run needs moments of the shape {tuple(parameter.shape)}"
            )
        if state:
            optimizer.state[parameter] = state


def _components(value: Tensor) -> dict[str, Tensor]:
    """Returns a plain tensor under "", and torchao's state of 8 bits as .codes, .scale, .qmap."""
    if not type(value).__module__.startswith("torchao."):
        return {"": value}
    from torchao.optim.subclass_8bit import OptimState8bit

    return {f".{component}": vars(value)[component] for component in OptimState8bit.tensor_attrs}


def _joined(key: str, stored: Mapping[str, Tensor], parameter: nn.Parameter) -> Tensor:
    if key == "step":
        return stored[key].clone()  # AdamW counts on the CPU
    if key in stored:
        return stored[key].to(parameter.device)
    from torchao.optim.subclass_8bit import OptimState8bit

    components = [
        stored[f"{key}.{component}"].to(parameter.device)
        for component in OptimState8bit.tensor_attrs
    ]
    return OptimState8bit(*components, signed=key == "exp_avg", dtype=parameter.dtype)
