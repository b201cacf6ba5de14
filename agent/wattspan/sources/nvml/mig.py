"""MIG: the instances of a divided GPU, their processes, and the usage of each.

NVML measures the energy of the whole board, and does not report utilisation by process while MIG is
on. The activity of each GPU instance is known from GPM samples (Hopper and later) or from DCGM's
exporter. Without either, the slices of the instances in use are assumed to be equally active, and
the usage says so. Inside an instance no driver tells the processes apart: they share it equally.

Activity is relative to the instance: an instance counts by its number of multiprocessors. Idle
energy is divided by compute slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wattspan.attribution.parts import usage_of_parts
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Domain,
    Failure,
    Instant,
    PartUsage,
    Payer,
    Provenance,
    Trouble,
    Usage,
)
from wattspan.ports import Clock
from wattspan.sources.driver_thread import CallInterval
from wattspan.sources.gpu.calls import (
    FUNCTION_NOT_FOUND,
    INVALID_ARGUMENT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    DriverError,
    GpuCalls,
)
from wattspan.sources.gpu.port import (
    GAUGE_SAMPLES,
    MAX_USAGE_INTERVAL,
    FailureOf,
    GpuSettings,
    driver_text,
)
from wattspan.sources.nvml.calls import MESSAGES
from wattspan.sources.nvml.dcgm import EXPORTER_INTERVAL, DcgmExporter
from wattspan.sources.nvml.processes import UTILISATION, GpuProcesses, Holders, UsageMeter

FULL = 1_000_000
"""All multiprocessors of an instance, all of the time: activities are in millionths of this."""

SPREAD = 2.5
"""The largest ratio of the active powers of two kinds of work with equally active multiprocessors.

On an H200 a burn test draws 550 W above idle, and decoding with large batches 220 W.
"""

BY_GPM, BY_DCGM, EQUALLY = "mig-gpm", "mig-dcgm", "mig-equal"
"""The methods by which the energy of a board is divided among its instances."""

_MAX_INSTANCES = 64  # a driver that counts more is not asked for each
_GPM_SM_UTIL = 2  # NVML_GPM_METRIC_SM_UTIL
_GPM_VERSION = 1


class MigInstance(NamedTuple):
    """A GPU instance. ``devices`` are the handles of its compute instances."""

    id: int
    uuid: str  # of its first compute instance
    name: str
    slices: int
    multiprocessors: int
    devices: tuple[Any, ...]

    @property
    def domain_id(self) -> str:
        return f"gpu:{self.uuid}"

    @property
    def key(self) -> tuple[int, str, str, int, int]:
        """Its properties, without the handles, which change with the session of the library."""
        return self[:5]


class InstanceList(NamedTuple):
    """The instances of a board and the number of its slices; ``refusal`` if NVML lists none."""

    instances: tuple[MigInstance, ...] = ()
    slices: int = 0
    refusal: int | None = None


def list_instances(calls: GpuCalls) -> InstanceList:
    """The present GPU instances, in the order of the driver."""
    slices, refusal = calls.try_call("nvmlDeviceGetMaxMigDeviceCount")
    if refusal is not None:
        return InstanceList(refusal=refusal)
    found: dict[int, MigInstance] = {}
    for index in range(min(int(slices), _MAX_INSTANCES)):
        device, refusal = calls.try_call("nvmlDeviceGetMigDeviceHandleByIndex", index)
        if refusal in {FUNCTION_NOT_FOUND, NOT_SUPPORTED, NO_PERMISSION}:
            return InstanceList(refusal=refusal)
        one = None if device is None else _instance(calls, device)
        if one is not None:
            found[one.id] = _joined(found[one.id], one) if one.id in found else one
    return InstanceList(tuple(found.values()), int(slices))


def _instance(calls: GpuCalls, device: Any) -> MigInstance | None:
    """The GPU instance of a MIG device; None if it was destroyed, or its size is unknown."""
    number, _ = calls.try_call("nvmlDeviceGetGpuInstanceId", handle=device)
    attributes, _ = calls.try_call("nvmlDeviceGetAttributes_v2", handle=device)
    uuid, _ = calls.try_call("nvmlDeviceGetUUID", handle=device)
    name, _ = calls.try_call("nvmlDeviceGetName", handle=device)
    if number is None or attributes is None or uuid is None:
        return None
    slices = max(1, int(attributes.gpuInstanceSliceCount))
    processors = int(attributes.multiprocessorCount) or slices
    return MigInstance(
        int(number), driver_text(uuid), driver_text(name), slices, processors, (device,)
    )


def _joined(one: MigInstance, other: MigInstance) -> MigInstance:
    """A GPU instance with one more compute instance: each has multiprocessors of its own."""
    return one._replace(
        multiprocessors=one.multiprocessors + other.multiprocessors,
        devices=one.devices + other.devices,
    )


class GpmActivity:
    """The activity of each instance between two calls, by GPM samples that take turns."""

    def __init__(self, calls: GpuCalls) -> None:
        self._library, self._calls = calls.library, calls
        self._samples: dict[int, tuple[Any, Any]] = {}  # by instance: the last, and the next
        self._complete: set[int] = set()  # instances with a last sample

    @property
    def refusal(self) -> int | None:
        """The code with which the driver refused; None if it did not."""
        return self._calls.refused(_GPM)

    def measure(self, instances: Sequence[MigInstance]) -> dict[int, int] | None:
        """Millionths by instance id since the last call; None if one is not known.

        The first call, and one after a change of the instances, return None. A call that the
        driver refuses for a moment returns None, too, and the next one covers its time.
        """
        if not self._calls.is_due(_GPM):
            return None
        ids = {one.id for one in instances}
        for gone in self._samples.keys() - ids:
            self._free(gone)
        try:
            for instance in ids:
                self._take(instance)
            known = {instance: self._since_last(instance) for instance in ids & self._complete}
        except DriverError as error:
            if error.code not in _TRANSIENT:
                self.close()
                self._calls.record_error(_GPM, error.code)
            return None
        self._calls.record_answer(_GPM)
        self._samples = {key: (new, before) for key, (before, new) in self._samples.items()}
        self._complete = ids
        found = {key: value for key, value in known.items() if value is not None}
        return found if found.keys() == ids else None

    def close(self) -> None:
        """Free the samples; the next call begins anew."""
        for instance in tuple(self._samples):
            self._free(instance)

    def _take(self, instance: int) -> None:
        """Take the newer sample of the two."""
        if instance not in self._samples:
            allocate = "nvmlGpmSampleAlloc"
            self._samples[instance] = self._library.call(allocate), self._library.call(allocate)
        self._library.call(
            "nvmlGpmMigSampleGet", self._calls.handle, instance, self._samples[instance][1]
        )

    def _since_last(self, instance: int) -> int | None:
        """Millionths between the two samples; None if the driver does not know."""
        structure = getattr(self._library.binding, "c_nvmlGpmMetricsGet_t", None)
        if structure is None:  # an old binding
            raise DriverError(FUNCTION_NOT_FOUND)
        asked = structure()
        asked.version, asked.numMetrics = _GPM_VERSION, 1
        asked.sample1, asked.sample2 = self._samples[instance]
        asked.metrics[0].metricId = _GPM_SM_UTIL
        self._library.call("nvmlGpmMetricsGet", asked)
        if asked.metrics[0].nvmlReturn:
            raise DriverError(asked.metrics[0].nvmlReturn)
        percent = float(asked.metrics[0].value)
        return round(min(100.0, percent) * FULL / 100) if percent >= 0 else None  # also for NaN

    def _free(self, instance: int) -> None:
        self._complete.discard(instance)
        for sample in self._samples.pop(instance):
            self._library.optional("nvmlGpmSampleFree", sample)


_GPM = "activity of MIG instances"
_TRANSIENT = frozenset({INVALID_ARGUMENT, NOT_FOUND})
"""No time between the samples, or an instance that was destroyed meanwhile."""


@dataclass(frozen=True, slots=True)
class DividedUse:
    """The instances of a board in a period, their processes, and their activity.

    ``holders`` have no entry of an instance whose processes the driver does not list. ``activity``
    is in millionths, by instance id; None if it is not known.
    """

    listed: InstanceList
    holders: Mapping[int, Holders]
    activity: Mapping[int, int] | None

    def usage(self, resource: str, start: Instant, end: Instant) -> Usage:
        """The usage from ``start`` to ``end``.

        Without known activity, all slices of the instances with a process are taken to be active.
        """
        duration = end.mono - start.mono
        instances, slices = self.listed.instances, max(1, self.listed.slices)
        processors = sum(one.multiprocessors for one in instances) * slices
        processors //= max(1, sum(one.slices for one in instances))
        parts = []
        for one in instances:
            held = self.holders.get(one.id, _UNKNOWN)
            if self.activity is None:
                busy = duration * one.slices // slices if held.number else 0
            else:
                busy = duration * one.multiprocessors // max(1, processors)
                busy = busy * self.activity[one.id] // FULL
            parts.append(self._part(one, held, busy))
        return usage_of_parts(Usage(resource, start, end, {}, capacity=duration), parts, slices)

    def _part(self, one: MigInstance, held: Holders, busy: int) -> PartUsage:
        spent: dict[Payer, int] = dict.fromkeys(held.payers, busy // max(1, held.number))
        return PartUsage(
            one.domain_id,
            one.slices,
            spent,
            0 if spent and held.number == len(spent) else busy - sum(spent.values()),
            held.payers,
            spread=math.inf if self.activity is None else SPREAD,
            users_guessed=held.number > 1,
        )


_UNKNOWN = Holders(frozenset(), 1)
"""A process may use the instance, and is not known."""


class MigDivision:
    """The division of one board into instances, through changes of its mode and its instances.

    ``method`` is that of the division of energy; "" without instances.
    """

    def __init__(
        self,
        calls: GpuCalls,
        processes: GpuProcesses,
        uuid: str,
        dcgm: DcgmExporter | None,
    ) -> None:
        self._calls, self._processes, self._uuid, self._dcgm = calls, processes, uuid, dcgm
        self._gpm = GpmActivity(calls)
        self._listed = InstanceList()
        self._holders: dict[int, Holders] = {}
        self._since: Instant | None = None  # the end of the last usage
        self._step = 0
        self.method = ""

    @property
    def instances(self) -> tuple[MigInstance, ...]:
        return self._listed.instances

    @property
    def step(self) -> int:
        """The time resolution of the usage, in nanoseconds."""
        return EXPORTER_INTERVAL if self.method == BY_DCGM else self._step

    def find(self, *, mig: bool) -> InstanceList:
        """The instances now; none without ``mig``."""
        return list_instances(self._calls) if mig else InstanceList()

    def differs(self, listed: InstanceList) -> bool:
        """True if the instances are others than those in use."""
        return [one.key for one in listed.instances] != [one.key for one in self.instances]

    def use(self, listed: InstanceList) -> None:
        """Use the same instances with their present handles."""
        self._listed = listed

    def begin(self, listed: InstanceList, at: Instant) -> None:
        """Use other instances from ``at`` on."""
        self._gpm.close()
        self._listed, self._since, self._holders = listed, at, {}
        self.method = (self.method or BY_GPM) if listed.instances else ""
        self._gpm.measure(self.instances)

    def list_processes(self) -> None:
        """Read the processes of each instance."""
        devices = {one.id: one.devices for one in self.instances}
        self._holders = self._processes.list_instances(devices)

    def usage(self, resource: str, at: Instant) -> Usage | None:
        """The use of the instances from the last usage to ``at``.

        None for no time, and while the driver refuses the activity for a moment: the next usage
        covers that time.
        """
        since = self._since
        if since is None or at.mono <= since.mono:
            return None
        activity = self._activity()
        if activity is None and self.method == BY_GPM and at.mono - since.mono < _MAX_JOINED:
            return None
        self._since = at
        self._step = round((at.mono - since.mono) / _GRAIN) * _GRAIN
        return DividedUse(self._listed, self._holders, activity).usage(resource, since, at)

    def _activity(self) -> dict[int, int] | None:
        """The activity of all instances by the best means there is; None without any."""
        activity = self._gpm.measure(self.instances)
        if activity is not None or self._gpm.refusal is None:
            self.method = BY_GPM
            return activity
        if self._dcgm is not None:
            activity = self._dcgm.activity(self._uuid)
            if activity is not None and all(one.id in activity for one in self.instances):
                self.method = BY_DCGM
                return activity
        self.method = EQUALLY
        return None

    def close(self) -> None:
        """Free the samples in the library."""
        self._gpm.close()

    def domains(self, board: Domain) -> tuple[Domain, ...]:
        """The domains of the instances, as parts of that of their board."""
        emulated = board.provenance is Provenance.EMULATED
        return tuple(
            Domain(
                id=one.domain_id,
                hw_type=board.hw_type,
                name=f"{board.name}, {one.name.rpartition('MIG ')[2]} {one.id}",
                source=board.source,
                provenance=Provenance.EMULATED if emulated else Provenance.ESTIMATED,
                in_cover=False,
                parent=board.id,
                method=self.method,
                max_power=board.max_power,
                resolution=board.resolution,
                usage_step=board.usage_step,
                why=f"{one.slices} of {self._listed.slices} slices of the board; "
                f"{_EXPLANATIONS[self.method]}",
            )
            for one in self.instances
        )

    def failures(self, failure: FailureOf) -> Iterator[Failure]:
        """The reasons for which the energy of instances is unknown, or an assumption."""
        refusal = self._listed.refusal
        if refusal is not None:
            cause = f"MIG is on, and the driver does not list them: {MESSAGES.cause_of(refusal)}"
            yield failure("MIG instances", Trouble.ABSENT, cause, _NOT_LISTED)
        elif not self.instances:
            cause = "MIG is on, and no instance exists"
            remedy = "Create one with nvidia-smi mig -cgi, or turn MIG off."
            yield failure("MIG instances", Trouble.ABSENT, cause, remedy)
        elif self.method == EQUALLY:
            cause = MESSAGES.cause_of(self._gpm.refusal or NOT_SUPPORTED)
            if self._dcgm is not None:
                cause += f", and of {self._dcgm.url}: {self._dcgm.trouble or 'no figure of it'}"
            yield failure("activity of the MIG instances", Trouble.ABSENT, cause, _NO_ACTIVITY)


_GRAIN = 50 * MILLISECOND
_MAX_JOINED = 2 * SECOND
"""Time without activity after which it is taken to be equal."""

_EXPLANATIONS = {
    BY_GPM: "its active energy by the activity that the driver reports",
    BY_DCGM: "its active energy by the activity that dcgm-exporter reports",
    EQUALLY: "its activity is unknown: each slice in use is charged equally",
}
_NOT_LISTED = (
    "Update the driver, or give the agent access to /dev/nvidia-caps; until then all of the board's"
    " energy stays unattributed."
)
_NO_ACTIVITY = (
    "Set [sources.nvml] dcgm to the address of dcgm-exporter, with DCGM_FI_PROF_SM_ACTIVE among its"
    " metrics; until then each slice in use is charged equally."
)


METHOD = "gpu-sm-utilisation"
MIN_ACTIVITY_PERIOD = 100 * MILLISECOND
"""NVML requires as much between two samples of the activity of a MIG instance."""


class NvmlUsage:
    """The GpuUsage of one board: by utilisation samples, or by MIG instances while it is divided.

    ``see_status`` tells what the newest status shows.
    """

    def __init__(
        self,
        resource: str,
        processes: GpuProcesses,
        division: MigDivision,
        settings: GpuSettings,
        list_interval: int,
        clock: Clock,
    ) -> None:
        """``list_interval`` is that of process lists."""
        self.pace = CallInterval(settings.usage_interval, clock, MAX_USAGE_INTERVAL)
        self._list_pace = CallInterval(list_interval, clock)
        period = max(MIN_ACTIVITY_PERIOD, GAUGE_SAMPLES * settings.interval)
        self._activity_pace = CallInterval(period, clock, MAX_USAGE_INTERVAL)
        self._resource, self._processes, self._division = resource, processes, division
        self._meter: UsageMeter | None = None
        self._present: frozenset[Payer] = frozenset()
        self._mig = self._vgpu_host = False
        self._unused: bool | None = None  # in all statuses since the last list
        self.division: object = ()

    def see_status(self, *, mig: bool, vgpu_host: bool, unused: bool) -> None:
        """``vgpu_host``: the board is divided among virtual machines.

        ``unused``: no process has come since the last one, and those in the list are none.
        """
        self._mig, self._vgpu_host = mig, vgpu_host
        self._unused = unused and self._unused is not False

    @property
    def method(self) -> str:
        return self._division.method or (METHOD if self._processes.named else "none")

    @property
    def step(self) -> int:
        if self._division.method:
            return self._division.step
        return 0 if self._meter is None else max(_GRAIN, round(self._meter.step / _GRAIN) * _GRAIN)

    @property
    def held(self) -> bool:
        return self._processes.any_listed

    def measure(
        self, at: Instant, busy: int | None, *, looked: bool, settle: bool
    ) -> Iterable[Usage]:
        if self._list_pace.begin(at.mono):
            with self._list_pace:
                if not self._unused:
                    self._list_processes()
            self._unused = None
        if self._division.instances:
            return self._of_instances(at) if self._activity_pace.begin(at.mono) else ()
        return self._of_processes(at, busy, settle=settle) if looked else ()

    def _list_processes(self) -> None:
        if self._division.instances:
            self._division.list_processes()
        else:
            self._present = self._processes.list_holders()

    def _of_instances(self, at: Instant) -> Iterable[Usage]:
        with self._activity_pace:
            usage = self._division.usage(self._resource, at)
        return () if usage is None else (usage,)

    def _of_processes(self, at: Instant, busy: int | None, *, settle: bool) -> Iterable[Usage]:
        if self._meter is None:
            self._meter = UsageMeter(self._resource, at)
        if settle:
            with self.pace:
                samples = self._processes.samples()
            self._meter.add_samples(samples or [])
        named = self._processes.named
        # A device without any utilisation has no remainder if processes have utilisation;
        # if processes have none either, all of it may have been in use.
        unknown = 0 if named else 100
        self._meter.observe_device(at.mono, unknown if busy is None else busy)
        return self._records(at.before(self._meter.lag if named else 0)) if settle else ()

    def _records(self, end: Instant) -> list[Usage]:
        if self._meter is None:
            return []
        named, guessed = self._processes.named, self._processes.guessed
        return self._meter.usages(end, self._present, named=named, guessed=guessed)

    def follow(self, at: Instant) -> Iterable[Usage]:
        """Settle the usage so far if the mode or the MIG instances have changed."""
        division = self._division
        listed = division.find(mig=self._mig)
        if not division.differs(listed):
            division.use(listed)
            return ()
        usages = self._of_instances(at) if division.instances else self._records(at)
        self._processes.retry()
        division.begin(listed, at)
        self.division = tuple(one.key for one in listed.instances)
        self.resume(at)
        self._list_processes()
        return usages

    def flush(self, at: Instant) -> Iterable[Usage]:
        """The driver can no longer report the last activity of MIG instances."""
        return () if self._division.instances else self._records(at)

    def resume(self, at: Instant) -> None:
        if self._meter is not None:
            self._meter.restart(at)

    def parts(self, board: Domain) -> tuple[Domain, ...]:
        return self._division.domains(board)

    def failures(self, failure: FailureOf) -> Iterator[Failure]:
        """Reasons for which energy cannot be charged to processes, or not to all of them."""
        refusal = self._processes.refusal
        if self._mig:
            yield from self._division.failures(failure)
        elif refusal is not None and refusal != NO_PERMISSION:
            cause = MESSAGES.cause_of(refusal)
            remedy = "All of its energy stays unattributed."
            if self._vgpu_host:
                cause = "the board is divided among virtual machines (vGPU)"
                remedy += " Its processes run inside of them."
            yield failure(UTILISATION, Trouble.ABSENT, cause, remedy)
        if self._processes.nested:
            yield failure(
                "all processes",
                Trouble.DENIED,
                "the agent runs in a pid namespace of its own",
                "Share the host's (hostPID: true, --pid=host); until then processes"
                " outside stay unattributed.",
            )
        if self._processes.misdated:
            cause = f"{self._processes.misdated} samples are from the future or beyond 100 %"
            yield failure(UTILISATION, Trouble.MALFORMED, cause, "")

    def close(self) -> None:
        self._division.close()
