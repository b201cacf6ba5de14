"""The ``nvml`` source plugin: NVIDIA GPUs, the driver session, and the thread that makes the calls.

The session initialises the library, finds GPUs, and recovers lost ones; it is synchronous.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wattspan.model import SECOND, Domain, Failure, Trouble
from wattspan.model.settings import quoted
from wattspan.ports import (
    Batch,
    Clock,
    CounterSource,
    SourceContext,
    SourceError,
    SourcePlugin,
)
from wattspan.sources import gpu_calls
from wattspan.sources.bound_devices import SYSFS, BoundDevices
from wattspan.sources.driver_thread import DriverThreadSource
from wattspan.sources.gpu_calls import GpuLostError, SessionLostError
from wattspan.sources.gpu_sampling import GpuFindings, unless_unchanged
from wattspan.sources.nvml import calls
from wattspan.sources.nvml.calls import SOURCE, NvmlLibrary, driver_text
from wattspan.sources.nvml.dcgm import DcgmExporter
from wattspan.sources.nvml.device import (
    GpuIdentity,
    GpuSampler,
    NvmlSettings,
)
from wattspan.sources.nvml.processes import in_nested_pid_namespace
from wattspan.util.throttle import RetryBackoff

LIBRARY = "libnvidia-ml.so.1"
KERNEL_DRIVER = "nvidia"
FIRST_DELAY = SECOND
MAX_DELAY = 8 * SECOND
"""Limit for the delay of a retry: a GPU or driver that returns is measured within ten seconds."""
REINITIALISE_AFTER = 20
"""Failures to recover a lost GPU after which the library is initialised again, although the other
GPUs answer: a GPU that was bound again is not found otherwise."""

MAX_GPUS = 256
"""No host has as many. A driver that counts four billion GPUs would otherwise be asked for each."""


def _new_backoff() -> RetryBackoff:
    return RetryBackoff(FIRST_DELAY, MAX_DELAY)


@dataclass(slots=True)
class LostGpu:
    """A GPU that does not answer, the reason, and the time of the next attempt."""

    index: int
    code: int
    backoff: RetryBackoff
    gpu: GpuSampler | None = None  # None: it never answered

    @property
    def failure(self) -> Failure:
        if self.gpu is None:
            return calls.call_failure(f"GPU {self.index}", self.code)
        domain = self.gpu.domain
        return calls.call_failure(domain.name, self.code, domain.id)


class NvmlSession:
    """All GPUs of the host. Belongs to one thread; ``sample`` never raises."""

    def __init__(
        self,
        nvml: Any,
        settings: NvmlSettings,
        context: SourceContext,
        *,
        nested: bool | None = None,
    ) -> None:
        """``nested``: pids are those of a pid namespace; None to find out."""
        self._clock = context.clock
        self._context = context
        self._settings = settings
        if nested is None:
            nested = not context.emulated and in_nested_pid_namespace()
        self._nested = nested
        self._library = NvmlLibrary(nvml, context.clock)
        self._bound = BoundDevices(context.sysfs or SYSFS, KERNEL_DRIVER)
        self._dcgm = DcgmExporter(settings.dcgm, context.clock) if settings.dcgm else None
        self._initialised = False
        self._driver = ""
        self._gpus: dict[str, GpuSampler] = {}  # by UUID: indices change when a GPU goes
        self._lost: dict[str | int, LostGpu] = {}  # by UUID, or by index where that is not known
        self._backoff = _new_backoff()
        self._down: Failure | None = None
        self._domains: tuple[Domain, ...] = ()

    def sample(self) -> Batch:
        """Make all calls that are due, and try to recover lost GPUs."""
        found = GpuFindings()
        now = self._clock.monotonic()
        if not self._initialised and self._backoff.is_due(now):
            if self._bound.all_suspended():
                self._down = _ASLEEP
            else:
                self._initialise(found)
        elif self._bound.appeared(now) and self._initialised:
            self._reinitialise(found)
        if self._initialised:
            self._recover_lost(now, found)
            self._ask_all(found)
        if self._initialised and not self._gpus:
            self._shut_down()
            self._backoff.failed(now)
        if found.readings:
            self._backoff.reset()
            found.failures.extend(self._unmatched_models())
        if self._down is not None:
            found.failures.append(self._down)
        found.failures.extend(lost.failure for lost in self._lost.values())
        return Batch(
            domains=self._all_domains(),
            readings=tuple(found.readings),
            failures=tuple(found.failures),
            usages=tuple(found.usages),
            gpus=tuple(found.gpus),
        )

    def _unmatched_models(self) -> Iterator[Failure]:
        """The configured static powers that are of no board."""
        models = [gpu.identity.model.casefold() for gpu in self._gpus.values()]
        for name in self._settings.static_powers:
            if not self._lost and not any(name.casefold() in model for model in models):
                yield Failure(
                    SOURCE,
                    f"static_watts of {quoted(name)}",
                    Trouble.ABSENT,
                    "no GPU here has a model with this name",
                    "Write a part of the name that `nvidia-smi -L` shows.",
                )

    @property
    def current_call(self) -> tuple[str, int] | None:
        """The call under way and the time of its start; other threads may read it."""
        return self._library.current

    def next_edge_read(self, now: int) -> int | None:
        """The time of the next extra read of a counter, if one is needed between samples."""
        wanted = [at for gpu in self._gpus.values() if (at := gpu.next_edge_read(now)) is not None]
        return min(wanted, default=None)

    def read_edges(self, now: int) -> None:
        """Make the extra reads that are due. The next sample reports errors of a GPU."""
        for gpu in list(self._gpus.values()):
            at = gpu.next_edge_read(now)
            if at is not None and at <= now:
                with contextlib.suppress(GpuLostError, SessionLostError):
                    gpu.read_edge()

    @property
    def near_an_edge(self) -> bool:
        """True if a counter moves at the time of the samples: another phase would be better."""
        return any(gpu.near_an_edge for gpu in self._gpus.values())

    def close(self) -> None:
        """Release the GPUs: while a process holds them they cannot be reset or unloaded."""
        for gpu in self._gpus.values():
            gpu.close()
        self._gpus.clear()
        self._shut_down()
        if self._dcgm is not None:
            self._dcgm.close()

    # -------------------------------------------------------------------- GPUs

    def _ask_all(self, found: GpuFindings) -> None:
        for uuid, gpu in list(self._gpus.items()):
            if self._bound.suspended(gpu.identity.pci):
                gpu.pause(found)
                continue
            try:
                gpu.sample(found)
            except GpuLostError as error:
                self._lose(uuid, error.code, found)
            except SessionLostError as error:
                self._fail(error.code, found)
                return
            except Exception as error:  # noqa: BLE001 - it costs one sample of one GPU
                found.failures.append(_unexpected_failure(gpu.domain.name, error, gpu.domain.id))
            else:
                gpu.backoff.reset()
                found.failures.extend(gpu.failures())

    def _lose(self, uuid: str, code: int, found: GpuFindings) -> None:
        gpu = self._gpus.pop(uuid)
        gpu.flush_usage(found)
        gpu.close()
        gpu.backoff.failed(self._clock.monotonic())
        self._lost[uuid] = LostGpu(gpu.identity.index, code, gpu.backoff, gpu)

    def _recover_lost(self, now: int, found: GpuFindings) -> None:
        """Try to get a new handle of each lost GPU: its old handle is invalid."""
        for key, lost in list(self._lost.items()):
            if not lost.backoff.is_due(now):
                continue
            try:
                handle = self._handle_of(lost)
                gpu = self._gpu(handle, lost.index)
            except Exception as error:  # noqa: BLE001 - the other GPUs are unaffected
                lost.code = gpu_calls.code_of(error)
                if lost.code in gpu_calls.SESSION_ERRORS:
                    self._fail(lost.code, found)
                    return
                lost.backoff.failed(now)
                if lost.backoff.failures % REINITIALISE_AFTER == 0:
                    self._reinitialise(found)
                    return
                continue
            del self._lost[key]
            self._gpus[gpu.identity.uuid] = gpu

    def _handle_of(self, lost: LostGpu) -> Any:
        if lost.gpu is None:
            return self._library.call("nvmlDeviceGetHandleByIndex", lost.index)
        return self._library.call("nvmlDeviceGetHandleByUUID", lost.gpu.identity.uuid)

    def _gpu(self, handle: Any, index: int) -> GpuSampler:
        identity = GpuIdentity(
            uuid=driver_text(self._library.call("nvmlDeviceGetUUID", handle)),
            index=index,
            model=driver_text(self._library.call("nvmlDeviceGetName", handle)),
            driver=self._driver,
            architecture=self._optional("nvmlDeviceGetArchitecture", handle),
            pci=calls.pci_address(self._optional("nvmlDeviceGetPciInfo", handle)),
        )
        lost = self._lost.get(identity.uuid)
        before = None if lost is None else lost.gpu
        return GpuSampler(
            self._library,
            handle,
            identity,
            self._context,
            self._settings,
            epoch=0 if before is None else before.epoch + 1,
            backoff=_new_backoff() if before is None else before.backoff,
            nested=self._nested,
            dcgm=self._dcgm,
        )

    def _optional(self, name: str, *arguments: Any) -> Any:
        """The answer of a call that may fail without consequences; None if it does."""
        try:
            return self._library.call(name, *arguments)
        except self._library.error:
            return None

    # ----------------------------------------------------------------- session

    def _initialise(self, found: GpuFindings) -> None:
        try:
            self._library.call("nvmlInit")
            self._initialised = True
            self._driver = driver_text(self._optional("nvmlSystemGetDriverVersion") or "")
            self._enumerate(found)
        except self._library.error as error:
            self._fail(gpu_calls.code_of(error), found)
        except Exception as error:  # noqa: BLE001 - the binding itself failed: try again later
            self._fail(gpu_calls.UNINITIALIZED, found, _unexpected_failure("NVML", error, None))

    def _reinitialise(self, found: GpuFindings) -> None:
        """Reinitialise to find lost or new GPUs; the others keep their counters."""
        self._shut_down()
        self._initialise(found)

    def _enumerate(self, found: GpuFindings) -> None:
        """Open every GPU; a GPU that cannot be opened is lost, not the others."""
        count = min(int(self._library.call("nvmlDeviceGetCount")), MAX_GPUS)
        gpus: dict[str, GpuSampler] = {}
        unnamed: dict[int, LostGpu] = {}
        for index in range(count):
            try:
                handle = self._library.call("nvmlDeviceGetHandleByIndex", index)
                gpu = self._gpu(handle, index)
            except Exception as error:
                code = gpu_calls.code_of(error)
                if code in gpu_calls.SESSION_ERRORS:
                    raise
                unnamed[index] = LostGpu(index, code, _new_backoff())
                unnamed[index].backoff.failed(self._clock.monotonic())
                continue
            known = self._gpus.get(gpu.identity.uuid)
            if known is not None:
                known.rebind(handle)
            gpus[gpu.identity.uuid] = known or gpu
        for uuid in self._gpus.keys() - gpus.keys():
            self._lose(uuid, gpu_calls.GPU_NOT_FOUND, found)
        self._down = None if count else _NO_GPU
        self._gpus = gpus
        self._lost = self._still_lost(unnamed)

    def _still_lost(self, unnamed: dict[int, LostGpu]) -> dict[str | int, LostGpu]:
        """The lost GPUs. One that is known by UUID is not listed a second time by its index."""
        lost: dict[str | int, LostGpu] = {
            uuid: entry
            for uuid, entry in self._lost.items()
            if isinstance(uuid, str) and uuid not in self._gpus
        }
        spare = list(unnamed.items())[len(lost) :]
        return {**lost, **dict(spare)}

    def _fail(self, code: int, found: GpuFindings, failure: Failure | None = None) -> None:
        """End the session: the driver or the connection to it is gone, and every handle with it."""
        for uuid in list(self._gpus):
            self._lose(uuid, code, found)
        self._shut_down()
        self._backoff.failed(self._clock.monotonic())
        self._down = failure or calls.call_failure("NVML", code)

    def _shut_down(self) -> None:
        if self._initialised:
            self._initialised = False
            self._optional("nvmlShutdown")

    def _all_domains(self) -> tuple[Domain, ...]:
        """The present and the lost; the same object while nothing about them changes."""
        lost = [entry.gpu.domain for entry in self._lost.values() if entry.gpu is not None]
        present = (one for gpu in self._gpus.values() for one in (gpu.domain, *gpu.instances))
        self._domains = unless_unchanged((*present, *lost), self._domains)
        return self._domains


_NO_GPU = Failure(
    SOURCE,
    "NVML",
    Trouble.ABSENT,
    "the driver is loaded and finds no GPU",
    "Look at lspci and dmesg; the agent keeps trying.",
)


_ASLEEP = Failure(
    SOURCE,
    "NVML",
    Trouble.ABSENT,
    "all GPUs are suspended, and a call would wake them",
    "They are read as soon as a program uses one.",
)


def _unexpected_failure(thing: str, error: Exception, domain_id: str | None) -> Failure:
    cause = f"an unexpected {type(error).__name__}: {error}"
    remedy = "Please report it with the driver's version."
    return Failure(SOURCE, thing, Trouble.MALFORMED, cause, remedy, domain_id)


class NvmlSource(DriverThreadSource):
    """The GPUs of an NvmlSession, read in a thread of their own."""

    name = SOURCE

    def __init__(self, session: NvmlSession, clock: Clock, settings: NvmlSettings) -> None:
        super().__init__(session, clock, settings, "NVML", "Look for Xid messages in dmesg")


def open_nvml(settings: NvmlSettings, context: SourceContext) -> CounterSource | None:
    """The GPUs of this host; None without NVML, unless ``enabled`` is true.

    A driver that is not loaded is no reason for None: it can be loaded at any time.
    """
    if settings.enabled is False:
        return None
    nvml = _nvml_of(context)
    if nvml is None:
        if settings.enabled is True:
            raise SourceError(
                f"Cannot read GPUs: {LIBRARY} was not found. Install NVIDIA's driver, or set"
                ' sources.nvml.enabled = "auto".'
            )
        return None
    source = NvmlSource(NvmlSession(nvml, settings, context), context.clock, settings)
    source.start()
    return source


def _nvml_of(context: SourceContext) -> Any:
    """The NVML to ask: an emulated host's own, and never the real one in its stead."""
    return context.nvml if context.emulated or context.nvml is not None else load_binding()


def load_binding() -> Any:
    """The ``pynvml`` module, or None without the library; it costs 6 MB that others can save."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml

    return pynvml


plugin = SourcePlugin(settings=NvmlSettings, open=open_nvml)
