"""A GPU in CPU memory, to find without a card what fails on one or makes the host wait for it.

Inside `tagged_device()` torch sees one CUDA device. A tensor that is made there or moved there is a
`Tagged` one: its numbers are real and lie in CPU memory, and it says that it is on `cuda:0`. What
CUDA refuses is refused, such as an operation on tensors of both devices or `numpy()` of a tensor of
the GPU. What makes the host wait for the GPU is counted.

Limits:
* Nothing is seen inside a backward of autograd, nor in what a checkpoint computes again there, nor
  inside a function of torch that is written in Python.
* Tensors that wrap others, such as torchao's, and DTensor cannot be tagged.
* `torch.cuda` is stubbed: the device has no memory of its own, no streams and no random numbers,
  and its autocast is that of the CPU. Optimizers and norms take their loops over single tensors.
* Threads that already run and other processes, such as Ray's workers, do not see the device.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import flowgrpo_rc

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
GROUPING = "_group_tensors_by_device_and_dtype"
PACKAGE = f"{Path(flowgrpo_rc.__file__).parent}/"
TORCH = f"{Path(torch.__file__).parent}/"

WAIT = "wait"  # the host waits for a number, a shape or the end of all work
TO_HOST = "to host"  # a copy, for which the host waits as well
TO_DEVICE = "to device"


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """Has a tensor take the memory and the device of another one, as CUDA allows."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    tensor.data = value
    if _tagged(value):
        tensor.__class__ = Tagged
        tensor._is_param = is_parameter  # type: ignore[attr-defined]
    elif _tagged(tensor):
        tensor.__class__ = torch.nn.Parameter if is_parameter else Tensor


_QUESTIONS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda tensor: CUDA if _tagged(tensor) else tensor.device,
    Tensor.is_cuda.__get__: lambda tensor: _tagged(tensor),
    Tensor.is_cpu.__get__: lambda tensor: tensor.is_cpu and not _tagged(tensor),
    Tensor.get_device: lambda tensor: 0 if _tagged(tensor) else tensor.get_device(),
    # Has `Module.to` make new parameters, since a tensor cannot change its type in place.
    torch._has_compatible_shallow_copy_type: lambda tensor, other: False,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.pin_memory: lambda tensor: tensor,
}
_MOVES = {Tensor.to, Tensor.cuda, Tensor.cpu}
_TO_NUMPY = {Tensor.numpy, Tensor.__array__}
_WAITS = {
    *(Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__float__, Tensor.__int__),
    *(Tensor.__index__, Tensor.__contains__, Tensor.__repr__, Tensor.__format__),
    *(Tensor.is_nonzero, torch.is_nonzero, Tensor.equal, torch.equal),
    *(Tensor.allclose, torch.allclose, Tensor.nonzero, torch.nonzero, torch.argwhere),
    *(Tensor.masked_select, torch.masked_select, Tensor.unique, torch.unique),
    *(Tensor.bincount, torch.bincount),
}
# Elsewhere a scalar of the host may stand beside tensors of the device, as a number would.
_NO_SCALARS = {torch.stack, torch.cat, torch.index_select, Tensor.index_select, torch.gather}
_ASSIGNMENTS = {Tensor.data.__set__, Tensor.grad.__set__}


class Event(NamedTuple):
    """Holds a wait of the host, or a copy; `place` is in the package, `source` calls torch."""

    phase: str
    kind: str
    call: str
    place: str
    source: str


class Record:
    """How often what happened, how often a phase began, and what was refused, caught or not."""

    def __init__(self) -> None:
        self.events: Counter[Event] = Counter()
        self.entered: Counter[str] = Counter()
        self.refused: list[str] = []
        self.is_open = True
        self._phase = ContextVar("phase", default="")

    def note(self, kind: str, call: str) -> None:
        self.events[Event(self._phase.get(), kind, call, _place(), _source())] += 1

    def refuse(self, error: type[Exception], reason: str) -> Exception:
        """Notes what the device refuses; returns the error to raise."""
        self.refused.append(f"{reason} ({_place()})")
        return error(self.refused[-1])

    def found(self, phase: str, *kinds: str) -> dict[Event, int]:
        """Returns how often what of these kinds happened in a phase."""
        return {
            event: number
            for event, number in self.events.items()
            if event.phase == phase and event.kind in kinds
        }

    def within(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function during which it is `phase`."""

        @functools.wraps(function)
        def followed(*args: Any, **kwargs: Any) -> Any:
            self.entered[phase] += 1
            before = self._phase.set(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._phase.reset(before)

        return followed


class Tagged(Tensor):
    """A tensor in CPU memory that stands for one of the GPU, inside `tagged_device()`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            new = self.detach().clone().as_subclass(Tagged).requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                new._is_param = True  # type: ignore[attr-defined]
            memo[id(self)] = new
        return memo[id(self)]


@contextmanager
def tagged_device(phases: Mapping[str, tuple[Any, str]] | None = None) -> Iterator[Record]:
    """Lets torch see a CUDA device, in this thread and in those that it starts.

    phases: name of a phase -> the object and the name of the function that it lasts. In nested
    phases the inner one counts.
    """
    record = Record()
    with ExitStack() as stack:
        for phase, (owner, name) in (phases or {}).items():
            followed = record.within(phase, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, followed))
        stack.enter_context(_stubbed_cuda(record))
        stack.enter_context(mock.patch.object(torch.autocast, "__init__", _start_autocast))
        stack.enter_context(mock.patch.object(torch._C, GROUPING, _group))
        stack.enter_context(_replaced_parameters())
        stack.enter_context(mock.patch.object(threading.Thread, "run", _run_thread(record)))
        stack.enter_context(_Mode(record))
        try:
            yield record
        finally:
            record.is_open = False


def _set_device(device: torch.device | int) -> None:
    if isinstance(device, torch.device) and device.index is None:
        raise ValueError(f"expected a device with an index, but got {device}")  # as CUDA does


def _stubbed_cuda(record: Record) -> Any:
    return mock.patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=_set_device,
        synchronize=lambda device=None: record.note(WAIT, "synchronize"),
        empty_cache=lambda: None,
        max_memory_allocated=lambda device=None: 0,
        max_memory_reserved=lambda device=None: 0,
        mem_get_info=lambda device=None: (0, 0),
        get_device_name=lambda device=None: "tagged",
        get_device_capability=lambda device=None: (9, 0),
        is_bf16_supported=lambda including_emulation=True: True,
        get_rng_state=lambda device=None: torch.empty(0, dtype=torch.uint8),
        set_rng_state=lambda state, device=None: None,
    )


_init_autocast = torch.autocast.__init__


def _start_autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    _init_autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _group(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
    """Groups tensors as torch's own function does, which is blind to tags."""
    groups: dict[Any, Any] = {}
    for place, row in enumerate(zip(*lists, strict=True)):
        key = CUDA if _tagged(row[0]) else row[0].device, row[0].dtype
        columns, places = groups.setdefault(key, ([[] for _ in lists], []))
        for column, tensor in zip(columns, row, strict=True):
            column.append(tensor)
        if with_indices:
            places.append(place)
    return groups


@contextmanager
def _replaced_parameters() -> Iterator[None]:
    """Has `Module.to` make new parameters in place of those that it converts."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _run_thread(record: Record) -> Callable[[threading.Thread], None]:
    run = threading.Thread.run

    def run_inside(self: threading.Thread) -> None:
        with _Mode(record):
            run(self)

    return run_inside


class _Mode(TorchFunctionMode):
    """Sees every call of torch in its thread. Calls inside of one are not seen."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._record.is_open:
            return func(*args, **kwargs)
        if func in _QUESTIONS:
            return _QUESTIONS[func](*args)
        if func is Tensor.__deepcopy__:  # whose memo may hold tensors of both devices
            return func(*args, **kwargs)
        if func in _MOVES:
            return _move(self._record, func, args, kwargs)
        if func is torch.empty and "pin_memory" in kwargs:  # there is no GPU to pin memory for
            return func(*args, **kwargs | {"pin_memory": False})
        device = _device_type(kwargs.get("device"))
        if device in ("cpu", "cuda"):
            return _make(self._record, func, args, kwargs, on_cuda=device == "cuda")
        if any(map(_tagged, _tensors([args, kwargs]))):
            return _compute(self._record, func, args, kwargs)
        return func(*args, **kwargs)


def _move(record: Record, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor, *rest = args
    other = kwargs.get("other", rest[0] if rest else None)
    dtype = layout = None
    if func is not Tensor.to:
        target = "cuda" if func is Tensor.cuda else "cpu"
    elif isinstance(other, Tensor):
        target = "cuda" if _tagged(other) else other.device.type
        dtype = other.dtype
    else:
        options = {name: value for name, value in kwargs.items() if name != "copy"}
        device, dtype, _, layout = torch._C._nn._parse_to(*rest, **options)
        here = "cuda" if _tagged(tensor) else tensor.device.type
        target = here if device is None else device.type
    if target not in ("cpu", "cuda"):
        return func(*args, **kwargs)
    on_cuda = target == "cuda"
    travels = on_cuda != _tagged(tensor)
    if travels:
        record.note(TO_DEVICE if on_cuda else TO_HOST, func.__name__)
    moved = tensor.to(
        dtype=dtype or tensor.dtype,
        copy=travels or bool(kwargs.get("copy")),
        memory_format=layout or torch.preserve_format,
    )
    return _tag(moved) if on_cuda else moved


def _make(
    record: Record, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_cuda: bool
) -> Any:
    """Calls a function that was told on which device to make its result."""
    given = [_tagged(tensor) for tensor in _tensors(args)]
    if on_cuda and kwargs.get("generator") is not None:
        raise record.refuse(RuntimeError, "Expected a 'cuda' device type for generator")
    if (
        on_cuda
        and (func in (torch.tensor, torch.as_tensor) or False in given)
        and True not in given
    ):
        record.note(TO_DEVICE, func.__name__)
    if not on_cuda and True in given:
        record.note(TO_HOST, func.__name__)
    made = func(*args, **{**kwargs, "device": CPU})
    if on_cuda:
        return _tag(made)
    return made.as_subclass(Tensor) if _tagged(made) else made


def _compute(record: Record, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls a function on tensors of which at least one is on the device."""
    name = func.__name__
    if func in _TO_NUMPY:
        raise record.refuse(TypeError, "can't convert cuda:0 device type tensor to numpy")
    if func in _WAITS or (func is torch.where and len(args) + len(kwargs) == 1):
        record.note(WAIT, name)
    if func is Tensor.new_tensor:
        record.note(TO_DEVICE, name)
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        _check_index(record, name, *args)
    elif func is Tensor.copy_:
        if _tagged(args[0]) != _tagged(args[1]):
            record.note(TO_DEVICE if _tagged(args[0]) else TO_HOST, name)
    else:
        _check_devices(record, func, args, kwargs)
    if func is Tensor.__iter__:
        return iter(_tag(args[0].unbind()))
    return _tag(func(*args, **kwargs))


def _check_devices(
    record: Record, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuses tensors of both devices, unless those of the host are scalars."""
    name = func.__name__
    scalars = func not in _NO_SCALARS and func not in _ASSIGNMENTS
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    wrong = [
        tuple(tensor.shape)
        for tensor in _tensors([args, kwargs])
        if _plain(tensor) and (tensor.ndim or not scalars)
    ]
    if wrong or (in_place and isinstance(args[0], Tensor) and _plain(args[0])):
        reason = "Expected all tensors to be on the same device, but found cuda:0 and cpu"
        raise record.refuse(RuntimeError, f"{reason}: {name} {wrong}")


def _check_index(record: Record, name: str, whole: Tensor, index: Any, value: Any = None) -> None:
    """Refuses indices on the wrong device, and notes those that the host has to read or send."""
    parts = list(_tensors(index))
    arrays = [part for part in parts if part.ndim]
    if not _tagged(whole) and any(map(_tagged, arrays)):
        reason = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        raise record.refuse(RuntimeError, reason)
    if not _tagged(whole):
        return
    if any(map(_plain, arrays)) or _has_list(index):
        record.note(TO_DEVICE, f"{name} by an index of the host")
    masks = [part for part in parts if part.dtype in (torch.bool, torch.uint8)]
    by_number = [part for part in parts if not part.ndim and part not in masks]
    if (masks and (value is None or isinstance(value, Tensor))) or any(map(_tagged, by_number)):
        record.note(WAIT, name)
    if isinstance(value, Tensor) and _plain(value):
        record.note(TO_DEVICE, name)


def _has_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) for part in parts)


def _place() -> str:
    """Returns the innermost line of the package that is at work."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "outside the package"


def _source() -> str:
    """Returns file and name of the innermost function outside torch and this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(TORCH):
        assert frame.f_back is not None
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"


def _device_type(device: Any) -> str | None:
    if device is None:
        return None
    return "cuda" if isinstance(device, int) else torch.device(device).type


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _tagged(tensor: Any) -> bool:
    return isinstance(tensor, Tagged)


def _plain(tensor: Tensor) -> bool:
    return not _tagged(tensor) and not tensor.is_meta


def _tag(value: Any) -> Any:
    """Returns a result with its tensors tagged."""
    if isinstance(value, Tensor):
        return value if type(value) is not Tensor or value.is_meta else value.as_subclass(Tagged)
    if isinstance(value, list):
        return [_tag(part) for part in value]
    if isinstance(value, tuple):
        parts = [_tag(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
