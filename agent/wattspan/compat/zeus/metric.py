"""Zeus's Prometheus metrics: energies and powers of windows, pushed to a gateway.

A thread reads them from the agent and pushes them, so no call waits for the network. Figures that
a gateway does not take now are pushed again. A window is also a span of the service ``job``, whose
energy is in the scrape of the agent.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import weakref
from base64 import b64encode, urlsafe_b64encode
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from threading import Event, Lock, Thread
from time import monotonic_ns
from typing import Any, ClassVar
from urllib.parse import quote, unquote_to_bytes, urlsplit

from wattspan import otel, sdk
from wattspan.compat.zeus.monitor import Measurement, ZeusMonitor
from wattspan.compat.zeus.power import PowerMonitor, to_unix
from wattspan.sdk import AgentBusyError, AgentUnavailableError, MeasurementError
from wattspan.util.http_get import FetchError, http_get, import_for_threads
from wattspan.util.text import printable

TICK, PUSH_TIMEOUT, EXIT_TIMEOUT = 1.0, 5.0, 10.0
"""Seconds between looks at the windows, for a push, and at exit for the last figures."""

MAX_WAITING = 8192
"""Ended windows that wait for their energy; further ones are not in the metric, and are logged."""

MAX_NAMES = 256
"""Names of windows in one push, of which those that changed last count; the rest is logged."""

_log = logging.getLogger("wattspan")
_FIRST_PID = os.getpid()
_FORMAT = {"content-type": "text/plain; version=0.0.4; charset=utf-8"}

_Family = tuple[str, str, str]
"""Name, type and help of a metric."""

_POWER = "power_monitor_gpu_power_watts", "gauge", "Records power consumption for GPU over time"


def _energy(device: str, kind: str, suffix: str = "") -> _Family:
    name = f"energy_monitor_{device.lower()}_energy_joules{suffix}"
    return name, kind, f"{device} energy consumption"


def _label(name: str, value: str) -> str:
    """A label of a group in the gateway's path."""
    if value and "/" not in value:
        return f"/{name}/{quote(value, safe='')}"
    return f"/{name}@base64/{urlsafe_b64encode(value.encode()).decode() or '='}"


def group_path(job: str, environ: Mapping[str, str] = os.environ) -> str:
    """The path of the figures of a job, which are apart for each of several processes."""
    ranked = environ.get("WORLD_SIZE", "1") != "1" and "RANK" in environ
    names = [f"rank-{environ['RANK']}"] if ranked else []
    if multiprocessing.parent_process() is not None:  # which may have the same rank
        names.append(multiprocessing.current_process().name)
    elif os.getpid() != _FIRST_PID:
        names.append(f"pid-{os.getpid()}")
    return "/metrics" + _label("job", job) + (_label("process", " ".join(names)) if names else "")


class PushedFigures:
    """The figures of one job in one process, and the thread that pushes them.

    Only that thread changes the figures. It ends at exit, with a last push.
    """

    def __init__(self, url: str, job: str, tick: float) -> None:
        parts = urlsplit(url if url.startswith(("http://", "https://")) else f"http://{url}")
        user, _, self._host = parts.netloc.rpartition("@")
        password = b64encode(unquote_to_bytes(user)).decode()
        self._headers = {**_FORMAT, "authorization": f"Basic {password}"} if user else _FORMAT
        path = parts.path.rstrip("/") + group_path(job)
        self._address = f"{parts.scheme}://{self._host}{path}"
        self._job, self._tick, self._pid = job, tick, os.getpid()
        self._figures: dict[_Family, dict[str, dict[str, float]]] = {}  # by window and sample
        self._names: dict[str, None] = {}  # in the order of their last changes
        self._left_out = 0
        self.bounds: dict[str, tuple[float, ...]] = {}
        self._metrics: set[_PushedMetric] = set()
        self._thread: Thread | None = None
        self._lock, self.ends = Lock(), Event()
        self._closes: Finalize | None = None
        self._failed = self._waiting = False

    def value(self, family: _Family, window: str, index: int, value: float, **more: str) -> None:
        """Set a gauge, or add to another figure; ``more`` has a suffix of its name and a label."""
        window = str(window).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        name, kind, _ = family
        labels = f'window="{window}",index="{index}"' + more.get("le", "")
        sample = f"{name}{more.get('suffix', '')}{{{labels}}}"
        samples = self._figures.setdefault(family, {}).setdefault(window, {})
        samples[sample] = value + (samples.get(sample, 0.0) if kind != "gauge" else 0.0)
        self._names.pop(window, None)
        self._names[window] = None
        if len(self._names) > MAX_NAMES:
            self._leave_out(next(iter(self._names)))

    def _leave_out(self, window: str) -> None:
        """Forget the figures of a window."""
        del self._names[window]
        for windows in self._figures.values():
            windows.pop(window, None)
        self._left_out += 1
        if self._left_out & (self._left_out - 1) == 0:  # 1, 2, 4, 8, ...
            text = (
                "A push of job %r has the %d windows that changed last; %d others, now %r, are "
                "left out. Give windows that repeat one name."
            )
            _log.warning(text, self._job, MAX_NAMES, self._left_out, window)

    def exposition(self) -> str:
        """The figures in Prometheus's text format."""
        return "".join(
            f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
            + "".join(
                f"{sample} {value!r}\n"
                for samples in windows.values()
                for sample, value in samples.items()
            )
            for (name, kind, text), windows in self._figures.items()
        )

    def add(self, metric: _PushedMetric) -> None:
        """Collect the figures of a metric while it has windows."""
        import_for_threads()
        with self._lock:
            self._metrics.add(metric)
            if not self._closes:  # at exit; a child of multiprocessing leaves atexit out
                self._closes = Finalize(None, _close_all, exitpriority=0)
            if self._thread is None:
                self._thread = Thread(target=self._work, name="wattspan-zeus-push", daemon=True)
                self._thread.start()

    def close(self, until: int | None = None) -> None:
        """Push the last figures, in at most EXIT_TIMEOUT seconds, or until a monotonic time."""
        thread = self._thread
        if thread is not None and os.getpid() == self._pid:
            self.ends.set()
            thread.join(EXIT_TIMEOUT if until is None else (until - monotonic_ns()) / 1e9)
            if thread.is_alive() or self._waiting:
                text = "The last figures of job %r are not in the Pushgateway %s."
                _log.warning(text, self._job, self._host)

    def _work(self) -> None:
        last = False
        while not last:
            last = self.ends.wait(self._tick)
            try:
                for metric in list(self._metrics):
                    self._waiting |= metric.collect(self, last=last)
                if self._waiting:
                    self._waiting = not self._push()
            except Exception:  # noqa: BLE001 - the next turn follows
                if not self._failed:
                    _log.exception("Figures of job %r are pushed later", self._job)
                self._failed = True
            with self._lock:
                self._metrics = {one for one in self._metrics if one.has_windows}
                last |= not self._metrics and not self._waiting
                self._thread = None if last else self._thread

    def _push(self) -> bool:
        """True if the gateway has the present figures; a failure is logged once."""
        body = self.exposition().encode(errors="replace")
        try:
            status, answer = http_get(
                self._address, timeout=PUSH_TIMEOUT, most=200, headers=self._headers, posted=body
            )
            why = f"it answered {status} {printable(answer.decode(errors='replace'))}"
        except FetchError as error:
            status, why = 0, str(error)
        taken = 200 <= status < 300
        if not taken and not self._failed:
            text = "The Pushgateway %s does not take the figures of job %r, which are kept: %s"
            _log.warning(text, self._host, self._job, why)
        elif taken and self._failed:
            _log.info("The Pushgateway %s takes the figures of job %r again", self._host, self._job)
        self._failed = not taken
        return taken


_PUSHED: dict[tuple[int, str, str], PushedFigures] = {}
"""By process, address and job: metrics of one job in one group do not replace each other's."""


def _close_all() -> None:
    """At exit: all jobs push their last figures at once, in EXIT_TIMEOUT seconds together."""
    until = monotonic_ns() + round(EXIT_TIMEOUT * 1e9)
    closing = [one for one in list(_PUSHED.values()) if not one.ends.is_set()]
    for one in closing:
        one.ends.set()
    for one in closing:
        one.close(until)


@dataclass(slots=True)
class _Section:
    """One window; its energy is in the figures up to the monotonic time ``taken``."""

    name: str
    taken: int
    span: Any
    due: int = 0
    ending: bool = False
    measurement: Any = None


class _PushedMetric:
    """Windows by name, of any thread; each is a span, too, if there is a tracer."""

    monitor_class: ClassVar[type[ZeusMonitor]] = ZeusMonitor
    tick: ClassVar[float] = TICK
    update_period: float = TICK

    def __init__(
        self, gpu_indices: Sequence[int], cpu_indices: Sequence[int], url: str, job: str
    ) -> None:
        self.gpu_indices, self.cpu_indices = list(gpu_indices), list(cpu_indices)
        self.pushgateway_url, self.job = url, job
        self.energy_monitor = self.monitor_class(self.gpu_indices, self.cpu_indices)
        self._tracer = self._tracer_of(job)
        self._lost = 0
        self._start_here()

    def _start_here(self) -> None:
        """At first, and in the child of a fork: windows of its parent stay the parent's."""
        self._pid = os.getpid()
        self._open: dict[str, _Section] = {}
        self._ended: deque[_Section] = deque()
        self.pushed: PushedFigures | None = None
        if self.pushgateway_url:
            key = self._pid, self.pushgateway_url, self.job
            self.pushed = _PUSHED.setdefault(key, PushedFigures(*key[1:], self.tick))
        else:
            _log.info("Nothing is pushed: pushgateway_url is empty.")

    @property
    def has_windows(self) -> bool:
        """True if windows are open, or wait for their energy."""
        return bool(self._open or self._ended)

    def _tracer_of(self, job: str) -> Any:
        """A tracer of spans of the service ``job``; None if there are no spans."""
        if otel.disabled():
            return None
        from wattspan.training.session import agent_tracer

        try:
            provider, tracer = agent_tracer(job)
        except ImportError as error:
            _log.warning("Windows of %s are no spans: %s", type(self).__name__, error)
            return None
        weakref.finalize(self, provider.shutdown)  # at exit at the latest
        return tracer

    def begin_window(self, name: str, sync_execution: bool = False) -> None:
        """Begin a window. ValueError if it is open."""
        self.energy_monitor.begin_window(name, sync_execution)
        now = monotonic_ns()
        if self._pid != os.getpid():
            self._start_here()
        span = None if self._tracer is None else self._tracer.start_span(str(name))
        self._open[name] = _Section(name, now, span)
        if self.pushed is not None:
            self.pushed.add(self)

    def end_window(self, name: str, sync_execution: bool = False) -> None:
        """End a window. ValueError if it is not open."""
        if (section := self._open.get(name)) is not None:
            section.ending = True  # from now on it is not sampled: the rest is read to the end
        try:
            measurement = self.energy_monitor.finish_window(name, sync_execution)
            section = self._open[name]
            section.measurement = measurement
            if section.span is not None:
                section.span.end()
            if len(self._ended) >= MAX_WAITING:
                self._lose(name, f"{MAX_WAITING} windows wait for the agent")
            elif self.pushed is not None:
                self._ended.append(section)
        finally:
            self._open.pop(name, None)  # after it waits for its energy, so that it is not missed

    def collect(self, figures: PushedFigures, *, last: bool) -> bool:
        """Add what is known now to the figures; True if they changed. In the pushing thread."""
        changed, now = False, monotonic_ns()
        for section in list(self._open.values()):
            if (now >= section.due or last) and not section.ending:
                section.due = now + round(max(self.tick, self.update_period) * 1e9)
                sdk.registration.renew_if_due()
                with suppress(MeasurementError, RuntimeWarning):  # it is read again later
                    changed |= self.sample(figures, section, now)
        while self._ended:
            section = self._ended[0]
            try:
                self.finish(figures, section, now)
            except Exception as error:  # noqa: BLE001 - a warning may be an error
                if isinstance(error, AgentUnavailableError | AgentBusyError) and not last:
                    break  # it may be restarting
                self._lose(section.name, str(error))
            self._ended.popleft()
            changed = True
        return changed

    def _lose(self, window: str, why: str) -> None:
        self._lost += 1
        if self._lost & (self._lost - 1) == 0:  # 1, 2, 4, 8, ...
            text = "%d windows of %s are not in the metric, now %r: %s"
            _log.warning(text, self._lost, type(self).__name__, window, why)

    def sample(self, figures: PushedFigures, section: _Section, now: int) -> bool:
        """Add the figures of an open window; True if there are some."""
        return False

    def finish(self, figures: PushedFigures, section: _Section, now: int) -> None:
        """Add the figures of an ended window."""


def _energies(part: Measurement) -> list[tuple[str, int, float]]:
    """Kind, index and joules of each device; all are read before the first is used."""
    kinds = ("GPU", part.gpu_energy), ("CPU", part.cpu_energy), ("DRAM", part.dram_energy)
    return [(kind, i, joules) for kind, found in kinds for i, joules in (found or {}).items()]


class EnergyHistogram(_PushedMetric):
    """The energies of the repetitions of a window, in buckets; signatures are those of Zeus.

    Histograms of one gateway and job have the buckets of the first.
    """

    def __init__(
        self,
        cpu_indices: list[int],
        gpu_indices: list[int],
        pushgateway_url: str,
        job: str,
        gpu_bucket_range: Sequence[float] = [50.0, 100.0, 200.0, 500.0, 1000.0],
        cpu_bucket_range: Sequence[float] = [10.0, 50.0, 100.0, 500.0, 1000.0],
        dram_bucket_range: Sequence[float] = [5.0, 10.0, 20.0, 50.0, 150.0],
    ) -> None:
        ranges = {"GPU": gpu_bucket_range, "CPU": cpu_bucket_range, "DRAM": dram_bucket_range}
        for device, bounds in ranges.items():
            if not bounds or list(bounds) != sorted(set(bounds)):
                raise ValueError(f"{device} bucket range must have rising bounds, not {bounds!r}.")
        self._bounds = {device: tuple(bounds) for device, bounds in ranges.items()}
        super().__init__(gpu_indices, cpu_indices, pushgateway_url, job)

    def begin_window(self, name: str, sync_execution: bool = True) -> None:
        """Begin a window. ValueError if it is open."""
        super().begin_window(name, sync_execution)

    def end_window(self, name: str, sync_execution: bool = True) -> None:
        """End a window. ValueError if it is not open."""
        super().end_window(name, sync_execution)

    def finish(self, figures: PushedFigures, section: _Section, now: int) -> None:
        """Observe the energies of an ended window."""
        for device, index, joules in _energies(section.measurement):
            put = partial(figures.value, _energy(device, "histogram"), section.name, index)
            for bound in figures.bounds.setdefault(device, self._bounds[device]):
                put(float(joules <= bound), suffix="_bucket", le=f',le="{float(bound)!r}"')
            put(1.0, suffix="_bucket", le=',le="+Inf"')
            put(1.0, suffix="_count")
            put(joules, suffix="_sum")


class EnergyCumulativeCounter(_PushedMetric):
    """The energy of a window since its first begin; signatures are those of Zeus.

    It is read while the window is open, every ``update_period`` seconds, and at its end.
    """

    def __init__(
        self,
        cpu_indices: list[int],
        gpu_indices: list[int],
        update_period: int,
        pushgateway_url: str,
        job: str,
    ) -> None:
        super().__init__(gpu_indices, cpu_indices, pushgateway_url, job)
        self.update_period = update_period

    def sample(self, figures: PushedFigures, section: _Section, now: int) -> bool:
        """Add the energy of an open window until now."""
        self._add(figures, section, self.energy_monitor.between(section.name, section.taken, now))
        section.taken = now
        return True

    def finish(self, figures: PushedFigures, section: _Section, now: int) -> None:
        """Add the rest of the energy of an ended window."""
        end = section.measurement.period[1]
        self._add(figures, section, section.measurement.part(section.taken, end))

    def _add(self, figures: PushedFigures, section: _Section, part: Measurement) -> None:
        for device, index, joules in _energies(part):
            figures.value(_energy(device, "counter", "_total"), section.name, index, joules)


class PowerGauge(_PushedMetric):
    """The power of GPUs while a window is open; signatures are those of Zeus.

    The last power of a window stays in the gateway, as in Zeus.
    """

    power_class: ClassVar[type[PowerMonitor]] = PowerMonitor

    def __init__(
        self,
        gpu_indices: list[int],
        update_period: int,
        pushgateway_url: str,
        job: str,
    ) -> None:
        super().__init__(gpu_indices, [], pushgateway_url, job)
        self.update_period = update_period
        self._powers = self.power_class(self.gpu_indices) if self.gpu_indices else None

    def sample(self, figures: PushedFigures, section: _Section, now: int) -> bool:
        """Set the power now, or at the window's end; the previous one stays without a reading."""
        ended = section.measurement and to_unix(section.measurement.period[1])
        found = None if self._powers is None else self._powers.get_power(ended)
        for index, watts in (found or {}).items():
            figures.value(_POWER, section.name, index, watts)
        return bool(found)

    def finish(self, figures: PushedFigures, section: _Section, now: int) -> None:
        """Set the power at the end of a window."""
        self.sample(figures, section, now)

    def _tracer_of(self, job: str) -> Any:
        return None
