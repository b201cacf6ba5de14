"""Worker processes of the capper, which carry out the calls of actuators, and the actuators."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import msgspec

from wattspan.capper.actuators import AwaitedActuator, AwaitedDriver
from wattspan.capper.actuators.cpu import CpuPower
from wattspan.capper.actuators.gpu import gpu_actuators
from wattspan.model import MILLISECOND, Knob, KnobState, Trouble
from wattspan.model.settings import quoted
from wattspan.ports import (
    ActuatorContext,
    ActuatorError,
    ActuatorPlugin,
    Clock,
    ConfigError,
    SlottedActuator,
)
from wattspan.sources.amdsmi.device import AmdSmiVendor
from wattspan.sources.amdsmi.source import BindingError
from wattspan.sources.amdsmi.source import load_binding as load_amd_binding
from wattspan.sources.nvml.device import NvmlVendor
from wattspan.sources.nvml.source import load_binding
from wattspan.sources.rapl.sysfs import POWERCAP_CLASS
from wattspan.util.text import printable

MAX_MESSAGE_BYTES: Final = 64 * 1024
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
PROCESS_NAME: Final = "capper-worker"
"""Tells a worker from the capper itself, whose command line it has."""


class WorkerCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of an actuator: ``device`` and ``value`` of reads and writes, ``slot`` of the rest."""

    action: Literal["read", "write", "count", "identify"]
    knob: Knob
    device: str = ""
    value: int | None = None
    slot: int = 0


class WorkerReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of a call: a state, a number of slots or an id; or ``error`` and ``trouble``."""

    result: KnobState | int | str | None = None
    error: str = ""
    trouble: Trouble | None = None
    locked: bool = False


_CALLS: Final = msgspec.json.Decoder(WorkerCall)


def spawn(actuators: Mapping[Knob, SlottedActuator]) -> tuple[socket.socket, int]:
    """Fork a worker; the socket to it, and its process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _detach(theirs, parent)
            _serve(theirs, actuators)
        finally:
            os._exit(0)
    theirs.close()
    return ours, pid


def _detach(channel: socket.socket, parent: int) -> None:
    """Keep nothing of the parent: a worker that hangs must hold no lock and no listener of it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # The parent restores limits through its workers after these signals reach the group.
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, PROCESS_NAME.encode())
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    gc.freeze()  # the parent's objects are never collected here, and their pages stay shared


def _serve(channel: socket.socket, actuators: Mapping[Knob, SlottedActuator]) -> None:
    """Answer calls until the parent closes its end."""
    while message := channel.recv(MAX_MESSAGE_BYTES):
        reply = _carry_out(_CALLS.decode(message), actuators)
        channel.send(msgspec.json.encode(reply))


def _carry_out(call: WorkerCall, actuators: Mapping[Knob, SlottedActuator]) -> WorkerReply:
    actuator = actuators[call.knob]
    try:
        match call.action:
            case "read":
                return WorkerReply(actuator.read(call.device))
            case "write":
                return WorkerReply(actuator.write(call.device, call.value))
            case "count":
                return WorkerReply(actuator.slots())
            case "identify":
                return WorkerReply(actuator.id_at(call.slot))
    except ActuatorError as error:
        return WorkerReply(None, str(error), error.trouble, error.locked)


# ------------------------------------------------------------------------------- the actuators

SYSFS = Path("/sys")
EMULATED_RESPONSE_TIME = 50 * MILLISECOND
"""An emulated host reads the files of its limits when its counters move: every 10 ms or so."""


def open_actuators(
    knobs: Collection[Knob],
    *,
    clock: Clock,
    nvml: Any = None,
    sysfs: Path = SYSFS,
    emulated: bool = False,
    amdsmi: Any = None,
    plugins: Mapping[str, ActuatorPlugin] = MappingProxyType({}),
    awaits: bool = False,
) -> tuple[SlottedActuator, ...]:
    """One actuator for each of ``knobs`` that this host may have, in the order of Knob.

    A knob of GPUs has one for each vendor, NVIDIA's first. ``nvml`` and ``amdsmi`` are used
    instead of the modules ``pynvml`` and ``amdsmi``, of which none is loaded then, nor for an
    ``emulated`` host, so that no real GPU is ever set instead of an emulated one. GPUs are
    included while the driver is not loaded: they appear once it is. With ``awaits`` a real host
    gets every knob: what has no library or driver yet appears once it has. No device is used
    before the first call. ``plugins`` are those that the configuration names, by name; ConfigError
    for one that fails.
    """
    found: list[SlottedActuator] = []
    gpu_knobs = [knob for knob in (Knob.GPU_POWER, Knob.GPU_CLOCK) if knob in knobs]
    is_real = nvml is None and amdsmi is None and not emulated
    for vendor, load, given in (
        (NvmlVendor, load_binding, nvml),
        (AmdSmiVendor, _load_amd, amdsmi),
    ):
        if given is not None:
            found += gpu_actuators(vendor(given, clock), gpu_knobs, sysfs)
        elif is_real and gpu_knobs:
            opener = partial(_open_gpus, vendor, load, clock, gpu_knobs, sysfs)
            driver = AwaitedDriver(sysfs / "module" / vendor.kernel_driver, opener)
            found += driver.open(gpu_knobs if awaits else ())
    if Knob.CPU_POWER in knobs:
        delay = EMULATED_RESPONSE_TIME if emulated else 0
        packages = CpuPower(sysfs, clock, answers_after=delay)
        tree = sysfs / POWERCAP_CLASS
        driver = AwaitedDriver(tree, lambda: [packages] if tree.is_dir() else [])
        found += driver.open([Knob.CPU_POWER] if awaits and not emulated else ())
    context = ActuatorContext(clock, knobs, sysfs)
    for name, plugin in plugins.items():
        try:
            found += plugin.open(context)
        except Exception as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".:")
            raise ConfigError(
                f"Cannot open the actuators {quoted(name)}: {printable(cause)}. Report it to the"
                " authors of the plugin, or remove it from caps.actuators."
            ) from error
    # The error of a driver that is there tells more, so it comes first.
    return tuple(sorted(found, key=lambda one: isinstance(one, AwaitedActuator)))


def _load_amd() -> Any:
    """The ``amdsmi`` module, or None if it does not load."""
    with suppress(BindingError):
        return load_amd_binding()
    return None


def _open_gpus(
    vendor: type[NvmlVendor | AmdSmiVendor],
    load: Callable[[], Any],
    clock: Clock,
    knobs: Collection[Knob],
    sysfs: Path,
) -> list[SlottedActuator]:
    """The actuators of a vendor's boards; none without its library."""
    binding = load()
    return [] if binding is None else gpu_actuators(vendor(binding, clock), knobs, sysfs)
