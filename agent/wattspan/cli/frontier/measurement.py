"""The trials of a study on this host: by the running agent and the capper, with their progress."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from wattspan.capper.protocol import CapperClient
from wattspan.cli.formatting import duration_text
from wattspan.cli.measure import MeasurementClient
from wattspan.cli.options import ConfigurationOptions, echo_error
from wattspan.clock import SystemClock
from wattspan.frontier.runner import HeldLimits, HoldSetting, WindowEnergy
from wattspan.frontier.schedule import TrialSchedule, spent_seconds
from wattspan.frontier.trials import MeasuredDevice, PowerLimit, Setting, Study, StudyFile, Trial
from wattspan.frontier.work import SteadyWindow
from wattspan.model import SECOND, CapKey, CapRow, Consumer, HwType, Knob
from wattspan.ports import Caps, CapsError, Clock, ConfigError
from wattspan.sdk import MeasurementError
from wattspan.sdk.client import Device, read_devices, request_json
from wattspan.service.configuration import capper_client

READ_TIMEOUT = 10.0
"""Seconds to wait for the energy of a window that has just ended."""

CAPPER_TIMEOUT = 5.0
"""Seconds for one request to the capper."""

MAX_OTHERS = 0.1
"""Share of the devices' active energy that other programs may have; more taints a trial."""

MIN_COVERAGE = 0.98
"""Share of a window that must have been measured."""

MIN_CELLS = 10
"""Least length of a window in cells, for a user who may read coarse figures only."""

_POWER_KNOBS = {HwType.GPU: Knob.GPU_POWER, HwType.CPU: Knob.CPU_POWER}


# -------------------------------------------------------------------------------------- devices


class MeasuredHost(NamedTuple):
    """The devices to measure, as the agent knows them.

    ``idle_unknown`` are those without an idle power: the agent cannot divide their energy.
    ``resolution`` is the length of the cells in seconds by which this user may read their energy,
    0 without cells.
    """

    name: str
    driver: str
    emulated: bool
    devices: Sequence[Device]
    idle_unknown: Sequence[Device] = ()
    resolution: float = 0.0


def measured_host(names: Sequence[str], clock: Clock, directories: tuple[str, ...]) -> MeasuredHost:
    """The devices with ``names``, by id, index or UUID; else the GPUs, or without any all devices.

    MeasurementError if no agent answers; ConfigError for an unknown name.
    """
    now = f"mono:{clock.monotonic()}"
    query = {"of": "devices", "start": now, "end": now}
    answer = request_json("/v1/energy", query, directories=directories)
    devices = [Device.of(one) for one in answer["devices"]]
    snapshot = request_json("/v1/snapshot", {}, directories=directories)
    drivers = {
        one["gpu"]["driver"] for one in snapshot["domains"] if (one.get("gpu") or {}).get("driver")
    }
    selected = _selected(devices, names)
    query["hw_id"] = ",".join(device.id for device in selected)
    cells = request_json("/v1/energy", query, directories=directories) if selected else answer
    return MeasuredHost(
        str(snapshot["host_name"]),
        ", ".join(sorted(drivers)),
        bool(answer["emulated"]),
        selected,
        without_idle_power(selected, snapshot["domains"]),
        cells["device_resolution_seconds"] or 0.0,
    )


def resolution_warning(host: MeasuredHost, window: float) -> str:
    """A sentence if this user's figures are coarse; "" if exact. MeasurementError if too coarse.

    The load is steady around a window of ``window`` seconds, so that a cell at its edge has about
    the power of the window.
    """
    if not host.resolution:
        return ""
    steps = (
        f"This user may read the energy of CPUs and memory only in steps of {host.resolution:g} s"
    )
    least = MIN_CELLS * host.resolution
    if window < least:
        raise MeasurementError(
            f"{steps}, and the window is shorter than {MIN_CELLS} steps. Set --window to"
            f" {least:g}s at least, or run this as root."
        )
    return f"{steps}, so that trials are less exact than those of root."


def without_idle_power(
    devices: Sequence[Device], domains: Sequence[Mapping[str, Any]]
) -> list[Device]:
    """The devices whose idle power is unknown in the ``domains`` of a snapshot."""
    known = {one["hw_id"] for one in domains if one["idle_power_watts"] is not None}
    return [device for device in devices if device.id not in known]


_IDLE_REMEDIES: Mapping[str, str] = {
    HwType.GPU: "end all programs on the GPU for some seconds",
    HwType.CPU: "leave the host at rest for some seconds, or set [processes] cpu_idle_watts",
    HwType.MEMORY: "leave the host at rest for some seconds, or set [processes] memory_idle_watts",
}


def idle_warning(host: MeasuredHost) -> str:
    """A sentence if other programs cannot be found on some devices; "" if they can."""
    if not host.idle_unknown:
        return ""
    names = ", ".join(device.name for device in host.idle_unknown)
    remedies = dict.fromkeys(
        _IDLE_REMEDIES.get(device.kind, "name other devices with --device")
        for device in host.idle_unknown
    )
    return (
        f"The idle power of {names} is unknown, so that trials beside other programs are not found"
        f" and count like the others. To find them, end this study, {'; '.join(remedies)}; then"
        " start it again."
    )


def _selected(devices: Sequence[Device], names: Sequence[str]) -> list[Device]:
    if not names:
        gpus = [one for one in devices if one.kind == HwType.GPU]
        return gpus or list(devices)
    found: dict[str, Device] = {}
    for name in names:
        matching = [one for one in devices if name in (one.id, one.uuid, _index(one))]
        if not matching:
            known = ", ".join(one.id for one in devices)
            raise ConfigError(f"--device {name}: the agent has no such device. It has {known}.")
        found |= {one.id: one for one in matching}
    return list(found.values())


def _index(device: Device) -> str | None:
    return str(device.number) if device.kind == HwType.GPU and device.number is not None else None


# ------------------------------------------------------------------------------------- settings


class SettableDevices:
    """The knobs of the measured devices, and the limits they had at the start."""

    def __init__(self, rows: Sequence[CapRow], devices: Sequence[Device]) -> None:
        """CapsError if no measured device can be set."""
        wanted = {device.id: device for device in devices}
        self._rows = {row.state.key: row for row in rows if row.state.key.device in wanted}
        self._power = [
            key
            for key in self._rows
            if key.knob is _POWER_KNOBS.get(HwType(wanted[key.device].kind))
        ]
        self._clock = [key for key in self._rows if key.knob is Knob.GPU_CLOCK]

    def original_watts(self, device: str) -> float | None:
        """The power limit of a device before the study."""
        return self._watts(device, self._original)

    def default_watts(self, device: str) -> float | None:
        """The power limit of a device by its maker."""
        return self._watts(device, lambda key: self._rows[key].state.default)

    def _watts(self, device: str, limit_of: Callable[[CapKey], int | None]) -> float | None:
        limits = (limit_of(key) for key in self._power if key.device == device)
        return next((limit / 1000 for limit in limits if limit is not None), None)

    def check(self, settings: Sequence[Setting]) -> None:
        """CapsError if a setting needs a knob that no measured device has."""
        for wanted, keys, what in (
            (any(one.power is not None for one in settings), self._power, "power limit"),
            (any(one.clock is not None for one in settings), self._clock, "clock"),
        ):
            if wanted and not keys:
                raise CapsError(
                    f"The {what} of the measured devices cannot be set here; `wattspan caps status`"
                    " lists the knobs of this host."
                )

    def caps(self, setting: Setting) -> dict[CapKey, int]:
        """The limits to hold for ``setting``."""
        found: dict[CapKey, int] = {}
        if setting.power is not None:
            for key in self._power:
                original = self._original(key)
                if original is None:
                    name = self._rows[key].state.name
                    raise CapsError(f"The present power limit of {name} cannot be read.")
                found[key] = setting.power.milliwatts(original)
        if setting.clock is not None:
            found |= dict.fromkeys(self._clock, setting.clock)
        return found

    def _original(self, key: CapKey) -> int | None:
        row = self._rows[key]
        return row.original if row.original is not None else row.state.requested


RENEWAL_INTERVAL: Final = SECOND
"""Between two renewals; the shortest lease that can be configured lasts for a second more."""

STEP_INTERVAL: Final = SECOND // 10
"""Between two steps down: the capper limits the size of one."""

MAX_STEPS: Final = 100
"""Steps after which a limit that is not reached is accepted as it is: the device's floor."""


class FixedLease:
    """Holds ``caps`` while the block runs. CapsError at its start if they are refused.

    A thread of its own renews the lease. The capper restores the original limits however the holder
    ends: with the block, by the end of the connection if the process is killed, and by the end of
    the lease if it hangs. ``lost`` tells in a sentence why the limits stopped being in force, ""
    while they are.
    """

    def __init__(
        self, connect: Callable[[], Caps], job: str, caps: Mapping[CapKey, int], why: str
    ) -> None:
        """``connect`` is called in the thread that renews: a client belongs to one thread."""
        self._connect, self._job, self._caps, self._why = connect, job, dict(caps), why
        self._started, self._ended = threading.Event(), threading.Event()
        self._refused: CapsError | None = None
        self._lost = ""
        self._rows: Mapping[CapKey, CapRow] = {}
        self._thread = threading.Thread(target=self._run, name="wattspan-lease", daemon=True)

    @property
    def lost(self) -> str:
        return self._lost

    def watts(self) -> Mapping[str, float]:
        """The enforced power limit of each held device."""
        return {
            key.device: row.state.enforced / 1000
            for key, row in self._rows.items()
            if key.knob is not Knob.GPU_CLOCK and row.state.enforced is not None
        }

    def __enter__(self) -> FixedLease:
        self._thread.start()
        self._started.wait()
        if self._refused is not None:
            self._thread.join()
            raise self._refused
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    # --------------------------------------------------------------------------- inner workings

    def _run(self) -> None:
        caps: Caps | None = None
        try:
            caps = self._connect()
            self._lower(caps)
        except CapsError as error:
            self._refused = error
        except Exception as error:  # noqa: BLE001 - the caps may not be in force: a refusal
            self._refused = CapsError(_unexpected(error))
        finally:
            self._started.set()
        try:
            if caps is not None and self._refused is None:
                self._renew(caps)
        finally:
            if caps is not None:
                caps.close()

    def _lower(self, caps: Caps) -> None:
        """Hold the caps, and repeat it until every limit is in force or moves no further."""
        before: dict[CapKey, int | None] = {}
        for _ in range(MAX_STEPS):
            self._read(caps.hold(self._job, self._caps, self._why))
            reached = {key: self._rows[key].state.requested for key in self._caps}
            if reached == before or all(
                self._rows[key].reaches(value) for key, value in self._caps.items()
            ):
                return
            before = reached
            if self._ended.wait(STEP_INTERVAL / SECOND):
                return

    def _renew(self, caps: Caps) -> None:
        try:
            while not self._ended.wait(RENEWAL_INTERVAL / SECOND):
                self._read(caps.rows(renew=True))
                for key in self._caps:
                    row = self._rows.get(key)
                    if row is None or row.wanted is None or row.holder != self._job:
                        name = key.device if row is None else row.state.name
                        cause = "" if row is None or not row.trouble else f" {row.trouble}"
                        self._lost = f"The limit of {name} is not held any more.{cause}"
                        return
            caps.release(self._job)
        except CapsError as error:  # the capper has ended, and restored the limits
            self._lost = str(error)
        except Exception as error:  # noqa: BLE001 - nobody renews the lease any more
            self._lost = _unexpected(error)

    def _read(self, rows: tuple[CapRow, ...]) -> None:
        self._rows = {row.state.key: row for row in rows if row.state.key in self._caps}


def _unexpected(error: Exception) -> str:
    return (
        f"The fixed limits cannot be held: {type(error).__name__}: {str(error)[:200]}. "
        "This is a bug; report it. The capper restores the original limits."
    )


def hold_settings(
    devices: SettableDevices | None, connect: Callable[[], Caps], job: str
) -> HoldSetting:
    """Holds the limits of a setting by a lease of the capper, for one trial."""

    @contextmanager
    def hold(setting: Setting) -> Iterator[HeldLimits]:
        caps = {} if devices is None else devices.caps(setting)
        lease = FixedLease(connect, job, caps, f"a trial at {setting}")
        with lease if caps else nullcontext():  # a trial without limits sets nothing
            yield lease

    return hold


def leases(configuration: ConfigurationOptions, devices: SettableDevices | None) -> HoldSetting:
    """Holds settings of ``devices`` by leases of the capper, named after this process."""
    return hold_settings(devices, partial(_connect, configuration), f"frontier {os.getpid()}")


def settable_here(
    configuration: ConfigurationOptions, settings: list[Setting], host: MeasuredHost
) -> tuple[list[Setting], SettableDevices | None]:
    """The settings that can be set here, and the devices; None if nothing is set. CapsError."""
    if not any(setting.capped for setting in settings):
        return settings, None
    client = _connect(configuration)
    try:
        settable = SettableDevices(client.rows(), host.devices)
        settable.check(settings)
        check_permission(settings, leases(configuration, settable))
    except CapsError as error:
        free = [setting for setting in settings if not setting.capped]
        if error.refusal or len(free) < 2:
            raise
        echo_error(f"warning: Only the parameters are compared, at the present limits. {error}")
        return free, None
    finally:
        client.close()
    return settings, settable


def _connect(configuration: ConfigurationOptions) -> CapperClient:
    config = configuration.load_without_plugins(client=True)
    who = f"wattspan frontier {os.getpid()}"
    return capper_client(config, SystemClock(), who, timeout=CAPPER_TIMEOUT)


def check_permission(settings: Sequence[Setting], hold: HoldSetting) -> None:
    """Hold the knobs of ``settings`` for a moment. CapsError with the remedy if that is refused.

    Power limits are held at the original ones, and clocks at the highest of the settings.
    """
    power = any(one.power is not None for one in settings)
    clocks = [one.clock for one in settings if one.clock is not None]
    with hold(Setting(PowerLimit(1.0) if power else None, max(clocks, default=None))):
        """Only the permission is wanted."""


# ---------------------------------------------------------------------------------------- meter


@dataclass(frozen=True, slots=True)
class AgentTrialMeter:
    """Measures the devices by their readings, and other programs on them by the agent's shares."""

    devices: Sequence[Device]
    client: MeasurementClient
    directories: tuple[str, ...] = ()

    def begin(self, command: Consumer) -> None:
        self.client.watch(command)

    def read(self, command: Consumer, window: SteadyWindow) -> WindowEnergy:
        found = read_devices(
            window.start,
            window.end,
            [device.id for device in self.devices],
            timeout=READ_TIMEOUT,
            timeline=True,
            directories=self.directories,
        )
        joules: dict[str, float] = {}
        for device in found:
            if device.joules is None or device.coverage < MIN_COVERAGE:
                raise MeasurementError(
                    f"The energy of {device.name} is not known for the window:"
                    f" {device.coverage:.0%} of it was measured."
                )
            joules[device.id] = device.joules
        temperatures = {
            device.id: float(device.temperatures[-1][1]) for device in found if device.temperatures
        }
        total = sum(joules.values())
        return WindowEnergy(total, temperatures, self._taint(command, window), joules)

    def _taint(self, command: Consumer, window: SteadyWindow) -> str:
        """A sentence if other programs certainly used the devices."""
        whole = self.client.read(command, window.start, window.end, READ_TIMEOUT)
        ids = {device.id for device in self.devices}
        kinds = {device.kind for device in self.devices}
        active = doubt = 0.0
        for device in whole.devices:
            if device.id in ids:
                if device.joules is None or device.idle is None:
                    return ""  # without the idle power, the shares of programs are not known
                active += device.joules - device.idle
                doubt += device.uncertainty or 0.0
        own = sum(joules for kind, joules in whole.joules.items() if kind in kinds)
        others = active - own
        if active > 0 and others - doubt > MAX_OTHERS * active:
            return (
                f"Other programs used {others / active:.0%} of the active energy of the measured"
                " devices."
            )
        return ""


def described(devices: Sequence[Device], settable: SettableDevices | None) -> list[MeasuredDevice]:
    """The devices as the file keeps them."""
    return [
        MeasuredDevice(
            id=device.id,
            name=device.model or device.name,
            kind=device.kind,
            provenance=device.provenance,
            original_watts=None if settable is None else settable.original_watts(device.id),
            default_watts=None if settable is None else settable.default_watts(device.id),
        )
        for device in devices
    ]


# --------------------------------------------------------------------------------------- trials


def carry_out(
    study: Study, schedule: TrialSchedule, attempt: Callable[..., Trial], kept: StudyFile
) -> Study:
    """Run the trials of the schedule, and keep each; returns the study at its end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        time_left(study, schedule.time_budget),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, speed_estimate_period=3600) as progress:
        done = len(study.trials)
        task = progress.add_task("", total=done + schedule.remaining(study), completed=done)
        while (planned := schedule.next(study)) is not None:
            text = f"{planned.setting}, {planned.block + 1} of {study.repeat}"
            progress.update(task, description=text)
            trial = attempt(planned)
            study = msgspec.structs.replace(study, trials=[*study.trials, trial])
            pruned = [*study.pruned, *schedule.pruned(study)]
            study = msgspec.structs.replace(study, pruned=pruned)
            kept.write(study)
            if trouble := trial_trouble(trial):
                progress.console.print(f"{text}: {trouble}", markup=False, highlight=False)
            done += 1
            total = done + schedule.remaining(study)
            progress.update(task, completed=done, total=total)
    if missing := schedule.missing(study):
        echo_error(
            f"The time budget has no room for another trial; {missing} of"
            f" {len(study.trials) + missing} trials were not run. To run more, use --resume with a"
            " larger --time-budget, or without one."
        )
    return study


def trial_trouble(trial: Trial) -> str:
    """The reason for which a trial does not count; "" if it does."""
    if trial.failure:
        return trial.failure
    return f"The trial does not count. {trial.taint}" if trial.taint else ""


class BudgetColumn(ProgressColumn):
    """The rest of a time budget, counted down while a task runs."""

    def __init__(self, left: float) -> None:
        """``left``: seconds at the start of the task."""
        super().__init__()
        self._left = left

    def render(self, task: Task) -> Text:
        left = max(0.0, self._left - (task.elapsed or 0.0))
        return Text(f"{duration_text(round(left * SECOND))} of the budget left")


def time_left(study: Study, budget: float | None) -> ProgressColumn:
    """The rest of ``budget`` seconds for all trials; without one, an estimate by past trials."""
    if budget is None:
        return TimeRemainingColumn()
    return BudgetColumn(budget - spent_seconds(study))
