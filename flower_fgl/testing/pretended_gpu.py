"""A GPU in pretence: CPU tensors that count as on ``cuda:0`` and refuse to be mixed.

Every torch function inside the context is watched. A tensor is on the GPU if it was moved
or created there, or computed from one that is. As on a real GPU, an operation raises if it
mixes devices, if its generator is on the other device, or if NumPy reads a GPU tensor.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda:0")
MARK = "_is_on_pretended_gpu"
MAY_MIX = {"copy_", "__set__", "_has_compatible_shallow_copy_type", "_parse_to"}
INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put"}
READ_BY_NUMPY = {"numpy", "__array__"}
DEVICE: Any = Tensor.device.__get__
IS_CUDA: Any = vars(torch._C.TensorBase)["is_cuda"].__get__


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor counts as on the GPU."""
    return bool(tensor.__dict__.get(MARK, False))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


class PretendedGenerator(torch.Generator):
    """A CPU generator that may count as on the GPU."""

    is_on_gpu = False

    def __new__(cls, device: Any = "cpu") -> PretendedGenerator:
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]  # as torch does
        made.is_on_gpu = torch.device(device).type == "cuda"
        return made


class PretendedGpu(TorchFunctionMode):
    """Watch every torch function."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == DEVICE:
            return GPU if is_on_gpu(args[0]) else func(*args)
        if func == IS_CUDA:
            return is_on_gpu(args[0])
        if name in ("_parse_to", "device"):
            result = func(*args, **kwargs)
            if isinstance(args[0], Tensor) and is_on_gpu(args[0]):
                return (GPU, *result[1:])
            return result
        found = list(tensors_in((args, kwargs)))
        on_gpu = any(is_on_gpu(tensor) for tensor in found)
        if name in READ_BY_NUMPY and on_gpu:
            raise TypeError(f"{name}: cannot convert a cuda tensor to numpy")
        args, kwargs, target = _without_device(name, args, kwargs)
        if target is None and name == "to" and len(found) == 2:
            target = GPU if is_on_gpu(found[1]) else torch.device("cpu")
        if name == "cuda":
            name, func, target = "to", Tensor.to, GPU
            args = (args[0], "cpu")
        if name in ("to", "cpu") and (target is not None or name == "cpu"):
            wanted = name == "to" and target == GPU
            result = func(*args, **kwargs)
            if wanted != is_on_gpu(args[0]):
                result = result.clone()
            return _mark(result, wanted)
        in_backward = torch._C._current_graph_task_id() != -1
        if on_gpu and name not in MAY_MIX and not in_backward:
            checked = found[:1] if name in INDEXING else found
            stray = [t for t in checked if not is_on_gpu(t) and t.dim()]
            if stray:
                raise RuntimeError(
                    f"{name}: expected all tensors on cuda:0, but one of shape "
                    f"{tuple(stray[0].shape)} is on the CPU"
                )
        is_result_on_gpu = on_gpu if target is None else target == GPU
        if name == "copy_":
            is_result_on_gpu = is_on_gpu(args[0])
        generator = kwargs.get("generator")
        if generator is not None and [*found, target] != [None]:
            is_there = getattr(generator, "is_on_gpu", False)
            if is_there != is_result_on_gpu:
                raise RuntimeError(f"{name}: the generator is on another device")
        result = func(*args, **kwargs)
        if name == "__set__":
            if len(args) == 2 and isinstance(args[1], Tensor):
                _mark(args[0], is_on_gpu(args[1]))
            return result
        # views of marked tensors keep their mark; shared objects are never unmarked
        if is_result_on_gpu:
            for tensor in tensors_in(result):
                _mark(tensor, True)
        return result


def _mark(tensor: Tensor, is_there: bool) -> Tensor:
    """Set where a tensor counts as being."""
    tensor.__dict__[MARK] = is_there
    return tensor


def _without_device(name: str, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Replace a GPU among the arguments by the CPU, and return the device they name."""
    target = None

    def read(value: Any, *, is_text: bool) -> Any:
        nonlocal target
        if isinstance(value, torch.device) or (is_text and isinstance(value, str)):
            device = torch.device(value)
            target = GPU if device.type == "cuda" else device
            return torch.device("cpu")
        return value

    args = tuple(read(value, is_text=name == "to") for value in args)
    if kwargs.get("device") is not None:
        kwargs["device"] = read(kwargs["device"], is_text=True)
    return args, kwargs, target


def gpu() -> contextlib.AbstractContextManager[None]:
    """Return a context with a GPU: the machine's, or a pretended one if it has none."""
    return contextlib.nullcontext() if torch.cuda.is_available() else pretended_gpu()


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Let torch find one GPU inside the context."""
    make = torch.nn.Parameter.__new__

    @functools.wraps(make)
    def new_parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        made = make(cls, data, requires_grad)
        return made if data is None else _mark(made, is_on_gpu(data))

    state = torch.get_rng_state()
    with contextlib.ExitStack() as stack:
        for place, value in {
            "torch.cuda.is_available": lambda: True,
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.get_device_name": lambda _=None: "pretended GPU",
            "torch.cuda.get_rng_state": lambda _=None: state,
            "torch.cuda.set_rng_state": lambda *_: None,
            "torch.cuda.manual_seed": lambda _: None,
            "torch.cuda.device": lambda _: contextlib.nullcontext(),
            # optimizers ask for a stream that captures, here or (torch 2.15) there
            "torch.cuda.is_current_stream_capturing": lambda: False,
            "torch.accelerator.current_accelerator": lambda *_, **__: None,
            "torch.nn.Parameter.__new__": new_parameter,
            "torch.Generator": PretendedGenerator,
        }.items():
            stack.enter_context(mock.patch(place, value))
        stack.enter_context(PretendedGpu())
        yield
