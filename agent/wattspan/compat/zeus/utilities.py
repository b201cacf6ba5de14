"""``zeus.utils``: frameworks and their processes, and the helpers that scripts for Zeus import.

A function of a framework imports those that it asks. PyTorch comes before JAX.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from pathlib import Path
from typing import Any, Literal, TypeVar

from wattspan.compat.zeus.monitor import DeviceSynchronizer, Framework, Measurement, ZeusMonitor
from wattspan.sdk import NotMeasuredError
from wattspan.util.text import printable

T = TypeVar("T")
MAX_ANSWER = 1 << 16  # bytes
_TRUTH = {"true": True, "false": False}
_FIXED_COLUMNS = 3  # begin, name and seconds of a window; then joules of each GPU

# ----------------------------------------------------------------------------------- frameworks


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


# -------------------------------------------------------------------------------------- scripts


def get_env(name: str, valtype: Callable[[str], T], default: T | None = None) -> T:
    """An environment variable as a value of a type. ValueError if it is invalid or missing."""
    text = os.environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"The environment variable {name} is missing. Set it.")
        return default
    if valtype is bool:
        if (truth := _TRUTH.get(text.lower())) is None:
            raise ValueError(f"{name}={text!r} is no truth value. Set true or false.")
        text = "1" * truth
    return valtype(text)


@dataclass
class LinearScaler:
    """A learning rate ``lr`` for batch size ``bs`` that grows with the batch size."""

    bs: int
    lr: float

    def compute_lr(self, new_bs: int) -> float:
        """The learning rate for another batch size."""
        return self.lr * new_bs / self.bs


@dataclass
class SquareRootScaler:
    """A learning rate ``lr`` for batch size ``bs`` that grows with its square root."""

    bs: int
    lr: float

    def compute_lr(self, new_bs: int) -> float:
        """The learning rate for another batch size."""
        return self.lr * sqrt(new_bs / self.bs)


def get_ip_lat_long(url: str = "https://ipinfo.io/json") -> tuple[float, float]:
    """Degrees of latitude and longitude of this network, by a service that it asks.

    OSError, also for an answer without a place.
    """
    from urllib.request import urlopen  # other helpers need none of it

    with urlopen(url, timeout=10) as answer:  # noqa: S310 - the caller's
        body = answer.read(MAX_ANSWER)
    try:
        latitude, longitude = map(float, json.loads(body)["loc"].split(","))
    except (AttributeError, LookupError, TypeError, ValueError):
        text = printable(body[:200].decode(errors="replace"))
        raise OSError(
            f"{url} does not know the place of this network: {text}. Write its latitude and "
            "longitude instead."
        ) from None
    return latitude, longitude


class ReplayZeusMonitor(ZeusMonitor):
    """Measures nothing: the end of each window returns the next line of ``log_file``.

    Lines are in the order of the windows' ends. ValueError for a file that is no such log.
    """

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        approx_instant_energy: bool = False,
        log_file: str | Path | None = None,
        ignore_sync_execution: bool = False,
        match_window_name: bool = True,
    ) -> None:
        if log_file is None:
            raise ValueError("log_file is missing: name the log of a ZeusMonitor.")
        self.approx_instant_energy, self.sync_with = approx_instant_energy, "torch"
        self.ignore_sync_execution = ignore_sync_execution
        self.match_window_name = match_window_name
        self._synchronizer, self._gpus = DeviceSynchronizer("torch"), None
        with Path(log_file).open(newline="", encoding="utf-8") as file:
            columns, *rows = csv.reader(file)
        found = [int(one.removeprefix("gpu").partition("_")[0]) for one in columns[_FIXED_COLUMNS:]]
        self._indices = found if gpu_indices is None else gpu_indices
        self._rows = iter(rows)
        self.ongoing_windows: list[str] = []

    @property
    def gpu_indices(self) -> list[int]:
        """The GPUs of the log, or those named instead."""
        return self._indices

    @property
    def cpu_indices(self) -> list[int]:
        """Empty: the log has no CPU packages."""
        return []

    def begin_window(self, key: str, sync_execution: bool = True, restart: bool = False) -> None:
        """Begin a window. RuntimeError if it is open, without ``restart``."""
        if key in self.ongoing_windows:
            if not restart:
                raise RuntimeError(f"Window {key!r} is open already. End it first.")
            self.ongoing_windows.remove(key)
        self.ongoing_windows.append(key)
        self._wait(sync_execution)

    def end_window(
        self, key: str, sync_execution: bool = True, cancel: bool = False
    ) -> Measurement:
        """The next line of the log; zeros, and no line is used, with ``cancel``.

        RuntimeError if no window ``key`` is open, or if the line is another one's or missing;
        NotMeasuredError for a line without an energy.
        """
        if key not in self.ongoing_windows:
            raise RuntimeError(f"Window {key!r} is not open. Begin it first.")
        self.ongoing_windows.remove(key)
        self._wait(sync_execution)
        if cancel:
            return Measurement(0.0, dict.fromkeys(self.gpu_indices, 0.0))
        if (row := next(self._rows, None)) is None:
            raise RuntimeError(f"The log has no line for window {key!r}. Record it to its end.")
        _, name, seconds, *joules = row
        if self.match_window_name and name != key:
            raise RuntimeError(f"The next line of the log is of window {name!r}, not {key!r}.")
        if len(joules) != len(self.gpu_indices):
            raise RuntimeError(f"A line of the log has {len(joules)} GPUs, not {self.gpu_indices}.")
        if "" in joules:
            raise NotMeasuredError(f"The log does not know all energies of window {key!r}.")
        energies = map(float, joules)
        return Measurement(float(seconds), dict(zip(self.gpu_indices, energies, strict=True)))

    def _wait(self, wanted: bool) -> None:
        if wanted and not self.ignore_sync_execution:
            self.synchronize()
