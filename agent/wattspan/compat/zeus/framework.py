"""``zeus.utils.framework``: devices and processes of PyTorch, JAX and CuPy.

A function imports the frameworks that it asks. PyTorch comes before JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal

from wattspan.compat.zeus.monitor import DeviceSynchronizer, Framework


def _module(name: str) -> Any:
    """A framework; None if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        return None


def _is_available(name: str, ensure_available: bool, has_gpu: Callable[[Any], object]) -> bool:
    if (module := _module(name)) is None:
        if ensure_available:
            raise RuntimeError(f"{name} is not installed. Install it, or name another framework.")
        return False
    if not has_gpu(module):
        raise RuntimeError(f"{name} has no GPU here. Install a build of it with support of GPUs.")
    return True


def torch_is_available(ensure_available: bool = False, ensure_cuda: bool = True) -> bool:
    """True if PyTorch is installed. RuntimeError if what is to be ensured is not there."""
    return _is_available(
        "torch", ensure_available, lambda torch: not ensure_cuda or torch.cuda.is_available()
    )


def jax_is_available(ensure_available: bool = False, ensure_cuda: bool = True) -> bool:
    """As ``torch_is_available``, of JAX."""
    return _is_available("jax", ensure_available, lambda jax: not ensure_cuda or jax.devices("gpu"))


def cupy_is_available(ensure_available: bool = False) -> bool:
    """As ``torch_is_available``, of CuPy."""
    return _is_available("cupy", ensure_available, lambda _: True)


_CHECKS: dict[str, Callable[..., bool]] = {
    "torch": torch_is_available,
    "jax": jax_is_available,
    "cupy": cupy_is_available,
}


def sync_execution(gpu_devices: list[int], sync_with: Framework = "torch") -> None:
    """Wait for the queued work of GPUs. RuntimeError without the framework, or without a GPU."""
    synchronizer = DeviceSynchronizer(sync_with)
    _CHECKS[sync_with](ensure_available=True)
    synchronizer.wait(gpu_devices)


def _group(torch: Any) -> Any:
    """``torch.distributed`` in a process of a group; None in another one."""
    found = torch.distributed
    return found if found.is_available() and found.is_initialized() else None


def all_reduce(
    object: list[int] | list[float], operation: Literal["sum", "max"]
) -> list[int] | list[float]:
    """The sums or maxima of numbers over all processes; the numbers, if there is only one."""
    if operation not in ("sum", "max"):
        raise ValueError(f"all_reduce knows no operation {operation!r}: write 'sum' or 'max'.")
    if get_world_size() == 1:
        return object
    if (torch := _module("torch")) is None:
        raise NotImplementedError("Processes of JAX are not reduced, as in Zeus: use PyTorch's.")
    group = torch.distributed
    real = any(isinstance(one, float) for one in object)
    numbers = torch.tensor(
        object,
        dtype=torch.float64 if real else torch.int64,
        device="cuda" if "nccl" in group.get_backend() else "cpu",
    )
    group.all_reduce(numbers, op=group.ReduceOp.SUM if operation == "sum" else group.ReduceOp.MAX)
    reduced: list[int] | list[float] = numbers.tolist()
    return reduced


def is_distributed() -> bool:
    """True in a process group of PyTorch, or with several devices of JAX. RuntimeError."""
    if (torch := _module("torch")) is not None:
        return _group(torch) is not None
    if (jax := _module("jax")) is not None:
        return bool(jax.device_count() > 1)
    raise RuntimeError("Neither torch nor jax is installed. Install the one of your program.")


def get_rank() -> int:
    """The number of this process among those of the program."""
    if (torch := _module("torch")) is not None:
        return int(group.get_rank()) if (group := _group(torch)) else 0
    return 0 if (jax := _module("jax")) is None else int(jax.process_index())


def get_world_size() -> int:
    """The number of processes of the program."""
    if (torch := _module("torch")) is not None:
        return int(group.get_world_size()) if (group := _group(torch)) else 1
    return 1 if (jax := _module("jax")) is None else int(jax.process_count())
