"""Checks of the sources, each opened as the agent does, and of GPUs that no source reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from wattspan.attribution.cover import decide, explain
from wattspan.attribution.frozen_counters import FROZEN_CAUSE, FROZEN_REMEDY
from wattspan.attribution.metering import energy_between
from wattspan.cli import formatting
from wattspan.cli.doctor import Diagnosis, Finding, declared, failure, note, ok, warning
from wattspan.config import Config
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Consumer,
    Domain,
    Failure,
    GpuStatus,
    HwType,
    Interval,
    PayerInfo,
    Provenance,
    Reading,
    Trouble,
    mean_power,
)
from wattspan.model.settings import Table
from wattspan.plugins import Plugins, source_advice
from wattspan.ports import Batch, Clock, CounterSource, SourceContext, SourcePlugin, WattspanError
from wattspan.sources.amdsmi.device import AMD
from wattspan.sources.amdsmi.source import BindingError
from wattspan.sources.amdsmi.source import load_binding as load_amdsmi
from wattspan.sources.nvml.source import LIBRARY
from wattspan.sources.nvml.source import load_binding as load_nvml
from wattspan.util.cpu_topology import CpuTopology
from wattspan.util.files import file_text

_WORK = 0.3  # seconds of CPU time on each socket
_TIMEOUT = 3 * SECOND  # for a source whose first reading comes from a thread of its own
_POLL_INTERVAL = 100 * MILLISECOND


class EmptyProcessDirectory:
    """A process directory for sources whose counters alone are read."""

    def identify(self, pid: int) -> Consumer | None:
        return None

    def has_ended(self, consumer: Consumer) -> bool:
        return False

    def describe(self, consumer: Consumer) -> PayerInfo | None:
        return None


@dataclass(slots=True)
class SourceProbe:
    """The result of two reads of a source."""

    domains: tuple[Domain, ...] = ()
    first: dict[str, Reading] = field(default_factory=dict)
    last: dict[str, Reading] = field(default_factory=dict)
    failures: dict[Failure, None] = field(default_factory=dict)
    gpus: dict[str, GpuStatus] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()

    @property
    def readable(self) -> int:
        """The number of counters that measure; an estimate is not a counter."""
        estimated = {d.id for d in self.domains if d.provenance is Provenance.ESTIMATED}
        return len(self.last.keys() - estimated - self.frozen)

    @property
    def unmoved(self) -> frozenset[str]:
        """Counters that have one value in both reads, and would show the work of CPUs."""
        return frozenset(
            one.id
            for one in self.domains
            if one.moves_with and one.id in self.first and self.power(one) == 0
        )

    def power(self, domain: Domain) -> int | None:
        """Milliwatts between the two reads; None if unknown."""
        first, last = self.first.get(domain.id), self.last.get(domain.id)
        if first is None or last is None or last.at.mono <= first.at.mono:
            return None
        change = energy_between(domain, first, last)
        return mean_power(change.energy, change.duration) if isinstance(change, Interval) else None

    def read(self, source: Callable[[], Batch], clock: Clock, done: Callable[[], bool]) -> None:
        """Read ``source`` until ``done``, or until the timeout."""
        deadline = clock.monotonic() + _TIMEOUT
        while True:
            batch = source()
            self.domains = batch.domains
            self.last |= {reading.domain_id: reading for reading in batch.readings}
            self.failures |= dict.fromkeys(batch.failures)
            self.gpus |= {gpu.domain_id: gpu for gpu in batch.gpus}
            if done() or clock.monotonic() >= deadline:
                return
            clock.sleep_until(clock.monotonic() + _POLL_INTERVAL)


def use_all_sockets(sysfs: Path) -> None:
    """Work for a moment on a CPU of each socket, so that its energy counter must move."""
    topology, allowed = CpuTopology(sysfs), os.sched_getaffinity(0)
    try:
        for socket in topology.sockets:
            cpus = {cpu for cpu in allowed if topology.socket_of(cpu) == socket}
            if not cpus:
                continue
            os.sched_setaffinity(0, cpus)
            until = _cpu_seconds() + _WORK
            while _cpu_seconds() < until:
                pass
    finally:
        os.sched_setaffinity(0, allowed)


def _cpu_seconds() -> float:
    spent = os.times()
    return spent.user + spent.system


def examine_sources(
    plugins: Plugins,
    config: Config,
    context: SourceContext,
    interval: int = SECOND,
    work: Callable[[Path], None] = use_all_sockets,
) -> Diagnosis:
    """Open each source, read it twice, ``interval`` nanoseconds apart, and close it.

    If a counter does not move, it is read again after some ``work`` of the CPUs below a sysfs.
    """
    sections = {
        f"Source {broken.table.partition('.')[2]}": [failure("plugin", broken.cause, broken.remedy)]
        for broken in plugins.broken
        if broken.table.startswith("sources.")
    }
    probes: dict[str, SourceProbe] = {}
    for name, plugin in plugins.sources.items():
        settings = config.sources[name]
        source = open_source(plugin, settings, context)
        if isinstance(source, Finding):
            advice = source_advice(plugins, config, name)
            sections[f"Source {name}"] = [source, *(warning("setting", one) for one in advice)]
            continue
        probe = probes[name] = SourceProbe()
        sysfs = context.sysfs or Path(str(getattr(settings, "sysfs", "/sys")))
        _probe(probe, name, source, context.clock, interval, partial(work, sysfs))
        sections[f"Source {name}"] = []
        if name == "rapl" and probe.last:
            title = f"RAPL by powercap and by pyRAPL, over {formatting.duration_text(interval)}"
            sections[title] = list(_compare_readers(settings, context, probe, interval))
    domains, cover = _decide_cover(probes)
    for name, probe in probes.items():
        findings = [*_domains(probe, domains), *map(failure_finding, probe.failures)]
        sections[f"Source {name}"] = findings or [declared("counters-none")]
    if cover:
        sections["Cover"] = cover
    emulated = any(domain.provenance is Provenance.EMULATED for domain in domains.values())
    readable = sum(probe.readable for probe in probes.values())
    emulated = emulated or context.emulated
    return Diagnosis(sections, readable, emulated, tuple(domains.values()))


def _decide_cover(probes: Mapping[str, SourceProbe]) -> tuple[dict[str, Domain], list[Finding]]:
    """The domains of all sources with the cover chosen, as the agent chooses it, and its reasons.

    An id that two sources list is the first one's.
    """
    listed: dict[str, Domain] = {}
    owners: dict[str, str] = {}
    findings = []
    for name, probe in probes.items():
        for domain in probe.domains:
            listed.setdefault(domain.id, domain)
            if (owner := owners.setdefault(domain.id, name)) != name:
                twice = declared("domain-listed-twice", domain=domain.id, owner=owner, name=name)
                findings.append(twice)
    present = {key for probe in probes.values() for key in probe.last.keys() - probe.frozen}
    decided = decide(listed.values(), present)
    for thing, member, others in explain(decided.values(), listed):
        counted = f"counted by {member.id}, {member.provenance}"
        silent = "" if member.id in present else ", which has no reading: its energy is unknown"
        instead = "".join(f"; not by {one.id}: {one.why}" for one in others)
        findings.append((warning if silent else ok)(str(thing), f"{counted}{silent}{instead}"))
    return decided, findings


def open_source(
    plugin: SourcePlugin, settings: Table, context: SourceContext
) -> CounterSource | Finding:
    """The source, or the reason why there is none."""
    enabled = getattr(settings, "enabled", None)
    if enabled is False:
        return declared("source-off")
    try:
        if (source := plugin.open(settings, context)) is not None:
            return source
        # With `auto` an absent device is no error; with `true` the source tells the reason.
        source = plugin.open(msgspec.structs.replace(settings, enabled=True), context)
    except WattspanError as error:
        return (failure if enabled is True else note)("nothing to read", str(error))
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return declared("source-broken", fault=_fault(error))
    if source is not None:
        source.close()
    return declared("source-empty")


def _probe(
    probe: SourceProbe,
    name: str,
    source: CounterSource,
    clock: Clock,
    interval: int,
    work: Callable[[], None],
) -> None:
    """Read ``source`` twice, a third time after some work if a counter stands still; close it."""
    try:
        probe.read(source.read, clock, lambda: bool(probe.last or probe.failures))
        probe.first = dict(probe.last)
        clock.sleep_until(clock.monotonic() + interval)
        probe.failures.clear()  # those of the second read count
        probe.read(source.read, clock, lambda: probe.last != probe.first or not probe.last)
        if probe.unmoved:
            work()
            clock.sleep_until(clock.monotonic() + interval)
            before = dict(probe.last)
            probe.read(source.read, clock, lambda: probe.last != before)
            probe.frozen = probe.unmoved
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        probe.failures[Failure(name, "the source", Trouble.MALFORMED, _fault(error))] = None
    finally:
        source.close()


def _fault(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _domains(probe: SourceProbe, decided: Mapping[str, Domain]) -> Iterator[Finding]:
    failed = {failure.domain_id for failure in probe.failures}
    for listed in probe.domains:
        domain = decided[listed.id]
        if domain.id in failed and domain.id not in probe.last:
            continue  # its failure is a finding
        name = f"{domain.hw_type} {domain.name}"
        if domain.hw_type is HwType.GPU and domain.parent is not None:
            part = f"a part of its board's energy, {domain.provenance}, not summed: {domain.why}"
            yield ok(name, part)
            continue
        if domain.id in probe.frozen:
            mark = failure if domain.in_cover else warning
            yield mark(name, f"{FROZEN_CAUSE}: its energy is unknown", FROZEN_REMEDY)
            continue
        power = probe.power(domain)
        figure = "no figure yet" if power is None else f"{formatting.watts(power / 1000)} W"
        constant = power == 0 and domain.in_cover  # some hypervisors show counters like this
        if constant:
            figure = "it does not move"
        place = "counted" if domain.in_cover else "not summed"
        reason = f": {domain.why}" if domain.why else ""
        gpu = _gpu(probe.gpus.get(domain.id))
        problem = constant or domain.id not in probe.last
        detail = f"{figure}, {domain.provenance}, {place}{reason}{gpu}"
        yield (warning if problem else ok)(name, detail)


_MIG_LIMIT = (
    "divided by MIG: one power limit for all instances, tuned only if all tenants belong to one"
    " declared job"
)


def _gpu(gpu: GpuStatus | None) -> str:
    if gpu is None:
        return ""
    limit = gpu.limits.enforced
    parts = [
        gpu.model,
        f"driver {gpu.driver}" if gpu.driver else "",
        f"power limit {limit / 1000:.0f} W" if limit is not None else "",
        _MIG_LIMIT if gpu.mig else "",
    ]
    text = ", ".join(filter(None, parts))
    return f"; {text}" if text else ""


def failure_finding(found: Failure) -> Finding:
    """The finding of a failure that a source reports."""
    permanent = found.trouble in (Trouble.DENIED, Trouble.STUCK, Trouble.MALFORMED)
    detail = f"{found.cause} ({found.trouble})"
    return (failure if permanent else warning)(found.thing, detail, found.remedy)


def _compare_readers(
    settings: Table, context: SourceContext, probe: SourceProbe, interval: int
) -> Iterator[Finding]:
    """The RAPL counters as powercap and pyRAPL read them."""
    from wattspan.sources.rapl.powercap import cross_check

    sysfs = context.sysfs or Path(str(getattr(settings, "sysfs", "/sys")))
    check = cross_check(sysfs, context.clock, duration=interval, emulated=context.emulated)
    names = {domain.id: f"{domain.hw_type} {domain.name}" for domain in probe.domains}
    for each in check.comparisons:
        yield (ok if each.agrees else warning)(
            names.get(each.domain_id, each.domain_id),
            f"{formatting.joules(each.powercap)} and {formatting.joules(each.pyrapl)}, "
            f"difference {'-' if each.difference < 0 else '+'}"
            f"{formatting.joules(abs(each.difference))}",
        )
    if not check.comparisons:
        reasons = [str(one) for one in check.failures] or ["nothing in common to compare"]
        yield note("not compared", reasons[0])


# -------------------------------------------------------------------------------------- unread GPUs


NVIDIA, INTEL = "0x10de", "0x8086"
"""Numbers of vendors of PCI devices, as the kernel writes them."""


class PciGpu(NamedTuple):
    """A display device of a vendor, as the kernel lists it. ``driver`` is "" without one."""

    address: str
    driver: str
    vendor: str = AMD
    integrated: bool = False  # in the processor: on the root bus


class GpuLibrary(NamedTuple):
    """The parts by which a vendor's GPUs are read: kernel driver, device file, library, source.

    ``missing`` returns the cause and the remedy if the library cannot be loaded.
    """

    vendor: str
    driver: str
    file: str
    missing: Callable[[], tuple[str, str] | None]
    source: str


def _without_nvml() -> tuple[str, str] | None:
    if load_nvml() is not None:
        return None
    return f"{LIBRARY} was not found", (
        "Install NVIDIA's driver with its libraries; in a container, use NVIDIA's container"
        " runtime with NVIDIA_DRIVER_CAPABILITIES=utility."
    )


def _without_amdsmi() -> tuple[str, str] | None:
    try:
        load_amdsmi()
    except BindingError as error:
        return error.cause, error.remedy
    return None


_LIBRARIES = {
    NVIDIA: GpuLibrary("NVIDIA", "nvidia", "dev/nvidiactl", _without_nvml, "nvml"),
    AMD: GpuLibrary("AMD", "amdgpu", "dev/kfd", _without_amdsmi, "amdsmi"),
}


def pci_gpus(root: Path = Path("/")) -> list[PciGpu]:
    """The GPUs of the three vendors under ``root``: display controllers and accelerators."""
    found = {}
    devices = [
        *(root / "sys/class/drm").glob("card*/device"),
        *(root / "sys/bus/pci/devices").glob("*"),
    ]
    for device in devices:
        place = device.resolve()
        vendor = file_text(place / "vendor")
        virtual = (place / "physfn").exists()  # a function for a virtual machine
        if vendor in {*_LIBRARIES, INTEL} and _is_gpu(place) and not virtual:
            driver = place / "driver"
            name = driver.resolve().name if driver.exists() else ""
            integrated = vendor == INTEL and ":00:02." in place.name
            found[place.name] = PciGpu(place.name, name, vendor, integrated)
    return [found[address] for address in sorted(found)]


def examine_gpus(
    root: Path,
    domains: Collection[Domain],
    *,
    emulated: bool = False,
    opens: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK),
) -> Iterator[Finding]:
    """Check that each GPU of the host under ``root`` is one of ``domains``, which are read.

    ``opens`` is true for a device file that this user may open.
    """
    if emulated:
        yield declared("gpus-not-examined")
        return
    boards = pci_gpus(root)
    if not boards:
        yield declared("gpus-none")
    readers = {domain.pci: domain.source for domain in domains if domain.pci}
    for board in boards:
        if board.address in readers:
            yield ok(_name(board), f"read by the source {readers[board.address]}")
    unread = [board for board in boards if board.address not in readers]
    for vendor, library in _LIBRARIES.items():
        own = [board for board in unread if board.vendor == vendor]
        if own:
            yield from _causes(root, own, library, opens)
    for board in unread:
        if board.vendor == INTEL:
            yield _intel(board)
    yield from _power_meters(root)


def _causes(
    root: Path, boards: Collection[PciGpu], library: GpuLibrary, opens: Callable[[Path], bool]
) -> Iterator[Finding]:
    """The reasons for which boards are not read, in the order in which they must be removed."""
    driver = library.driver
    if not (root / "sys/module" / driver).is_dir():
        yield declared(f"{library.source}-driver", gpus=_names(boards))
        return
    others = [board for board in boards if board.driver != driver]
    yield from (_other_driver(board, driver) for board in others)
    boards = [board for board in boards if board.driver == driver]
    if not boards:
        return
    what, file = _names(boards), root / library.file
    if not file.exists():
        yield declared(f"{library.source}-file", gpus=what, file=file)
    elif not opens(file):
        yield declared(f"{library.source}-rights", gpus=what, file=file)
    missing = library.missing()
    if missing is not None:
        cause, remedy = missing
        yield warning(what, f"not read: {cause}", remedy)
    elif file.exists() and opens(file):
        yield declared("gpu-unexplained", what=what, source=library.source, driver=driver)


def _other_driver(board: PciGpu, wanted: str) -> Finding:
    code = "gpu-of-nouveau" if board.driver == "nouveau" else "gpu-of-other-driver"
    code = code if board.driver else "gpu-unused-by-driver"
    return declared(code, gpu=_name(board), driver=board.driver, wanted=wanted)


def _intel(board: PciGpu) -> Finding:
    """An Intel GPU has no library here: its driver's sensor under hwmon is all there is.

    The driver i915 has it since Linux 6.2, by the kernel's Documentation/ABI/testing/
    sysfs-driver-intel-i915-hwmon. The file of xe names 6.5, but the driver came with Linux 6.8.
    """
    code = "gpu-of-intel-without-counter"
    if board.integrated:
        code = "gpu-in-processor"
    elif board.driver not in {"i915", "xe"}:
        code = "gpu-of-intel-with-other-driver" if board.driver else "gpu-of-intel-without-driver"
    return declared(code, gpu=_name(board), driver=board.driver)


def _power_meters(root: Path) -> Iterator[Finding]:
    """ACPI power meters of the firmware without a driver: those of Grace, for example."""
    meters = sorted(each.name for each in (root / "sys/bus/acpi/devices").glob("ACPI000D:*"))
    chips = (root / "sys/class/hwmon").glob("*/name")
    if meters and not any(file_text(chip) == "power_meter" for chip in chips):
        yield declared("power-meter-without-driver", meters=", ".join(meters))


def _name(board: PciGpu) -> str:
    return _names([board])


def _names(boards: Iterable[PciGpu]) -> str:
    known = list(boards)
    library = _LIBRARIES.get(known[0].vendor)
    vendor = "Intel" if library is None else library.vendor
    return f"{vendor} GPU {', '.join(board.address for board in known)}"


def _is_gpu(device: Path) -> bool:
    """True for display controllers and processing accelerators (PCI classes 03 and 12)."""
    return file_text(device / "class")[:4] in {"0x03", "0x12"}
