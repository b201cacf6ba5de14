"""The devices behind the actuators, with the last state of each knob."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from wattspan.attribution.metering import SUSPENDED
from wattspan.capper.actuators import AwaitedActuator, AwaitedDriver
from wattspan.capper.actuators.cpu import CpuPower
from wattspan.capper.actuators.gpu import gpu_actuators
from wattspan.capper.protocol import RefusalReason
from wattspan.model import (
    MILLISECOND,
    SECOND,
    CapKey,
    DevicePresence,
    Instant,
    Knob,
    KnobState,
    ModelEnum,
    Trouble,
)
from wattspan.model.settings import quoted
from wattspan.ports import (
    Actuator,
    ActuatorContext,
    ActuatorError,
    ActuatorPlugin,
    CapsError,
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


class ConcurrentActuator(Actuator, Protocol):
    """An actuator that reads several devices at once, and lists them although some hang."""

    @property
    def unidentified(self) -> int | None:
        """Number of all devices if some of them hang and cannot be identified; else None."""
        ...

    def prefetch(self, devices: Iterable[str]) -> None:
        """Begin to read ``devices``; ``read`` then takes up the result."""
        ...


_FIRST_DELAY, _MAX_DELAY = SECOND, 60 * SECOND
_MAX_ABSENT_DELAY = 5 * SECOND
_RESUMING = 30 * SECOND
"""Firmware may set its limits this long after the host resumed."""
_FIRST_PERSISTENT_DELAY, _MAX_PERSISTENT_DELAY = 60 * SECOND, 3600 * SECOND
_PERSISTENT = (RefusalReason.NO_PERMISSION, RefusalReason.LOCKED, RefusalReason.NOT_HONOURED)
"""A missing permission is not corrected within seconds; a locked register stays so until boot."""


class _RetryDelay(NamedTuple):
    until: int
    length: int
    error: CapsError


_NO_ANSWER = (Trouble.RETRY, Trouble.ABSENT, Trouble.STUCK)


class Absence(ModelEnum):
    """The evidence that a device may have lost its settings since they were last confirmed."""

    NONE = "none"
    UNANSWERED = "unanswered"  # a call failed: it may have been absent, or busy
    RESET = "reset"  # the device, its driver or the host was gone, and has returned


class ManagedDevices:
    """Calls the actuator of a knob. Errors are CapsErrors.

    Keeps the last state of each knob, the delay after which a failed one is tried again, and
    whether its device was absent.
    """

    def __init__(self, actuators: Sequence[ConcurrentActuator], clock: Clock) -> None:
        self.knobs: dict[CapKey, KnobState] = {}
        """Every known knob as last read."""
        self.stuck: set[CapKey] = set()
        """Knobs whose last call did not return within its deadline."""
        self._clock = clock
        self._delays: dict[CapKey, _RetryDelay] = {}
        self._unanswered: set[CapKey] = set()
        self._resumed: dict[CapKey, int] = {}
        self._confirmed: dict[CapKey, tuple[DevicePresence, Instant]] = {}
        self._actuators = {actuator.knob: actuator for actuator in actuators}
        self._unlisted: dict[Knob, ActuatorError] = {}

    def find(self) -> None:
        """List the devices; one that does not answer now keeps its last state."""
        for knob, actuator in self._actuators.items():
            try:
                self.knobs.update((state.key, state) for state in actuator.devices())
            except ActuatorError as error:
                self._unlisted[knob] = error
            else:
                self._unlisted.pop(knob, None)

    def is_listed(self, knob: Knob) -> bool:
        """True if the devices of the knob could be listed last time."""
        return knob in self._actuators and knob not in self._unlisted

    @property
    def listing_stuck(self) -> bool:
        """True if the devices of a knob are unknown because the driver does not answer."""
        return any(error.trouble is Trouble.STUCK for error in self._unlisted.values())

    @property
    def stuck_names(self) -> tuple[str, ...]:
        """The names of devices with a driver call that does not return."""
        return tuple(sorted({self.knobs[key].name for key in self.stuck & self.knobs.keys()}))

    @property
    def hidden(self) -> bool:
        """True if there are devices that hang and are not among the known ones."""
        known = [key.knob for key in self.knobs]
        return self.listing_stuck or any(
            (count := actuator.unidentified) is not None and count > known.count(knob)
            for knob, actuator in self._actuators.items()
        )

    def prefetch(self, keys: Iterable[CapKey]) -> None:
        """Begin to read ``keys``, so that several devices that hang share one deadline."""
        for knob, group in groupby(sorted(keys), key=lambda key: key.knob):
            if knob in self._actuators:
                self._actuators[knob].prefetch(key.device for key in group)

    def read(self, key: CapKey) -> KnobState:
        try:
            return self._call(key, lambda actuator: actuator.read(key.device))
        except DeviceError as error:
            if error.trouble in _NO_ANSWER:
                self._unanswered.add(key)
            raise

    def write(self, key: CapKey, value: int | None) -> KnobState:
        """Set one knob, and read it back."""
        return self._call(key, lambda actuator: actuator.write(key.device, value))

    # ----------------------------------------------------------------------------- presence

    def absence(self, key: CapKey, recorded: DevicePresence) -> Absence:
        """The evidence since ``confirm``; before the first one, since ``recorded``."""
        now, (confirmed, at) = self.knobs[key].presence, self._confirmed.get(key, (None, None))
        if confirmed is None or at is None:
            was_reset = now.was_reset(recorded, same_process=False)
        else:
            was_reset = self._has_slept(at) or now.was_reset(confirmed, same_process=True)
        if was_reset:
            return Absence.RESET
        resumed = self._resumed.get(key)
        settling = resumed is not None and self._clock.monotonic() - resumed < _RESUMING
        return Absence.UNANSWERED if settling or key in self._unanswered else Absence.NONE

    def confirm(self, key: CapKey) -> None:
        """Begin to look for an absence anew: the knob's setting is known."""
        _, before = self._confirmed.get(key, (None, None))
        if before is not None and self._has_slept(before):
            self._resumed[key] = self._clock.monotonic()
        self._confirmed[key] = self.knobs[key].presence, self._clock.now()
        self._unanswered.discard(key)

    def confirmed(self, key: CapKey, recorded: DevicePresence) -> DevicePresence:
        """The presence at the last ``confirm``; ``recorded`` before the first one."""
        return self._confirmed[key][0] if key in self._confirmed else recorded

    def _has_slept(self, since: Instant) -> bool:
        return self._clock.now().asleep - since.asleep > SUSPENDED

    # ------------------------------------------------------------------------- retry delays

    def resting(self, key: CapKey) -> CapsError | None:
        """The error of a knob that is not tried before its retry delay ends."""
        delay = self._delays.get(key)
        return delay.error if delay and self._clock.monotonic() < delay.until else None

    def failure(self, key: CapKey) -> CapsError | None:
        """The error of a knob that failed when it was last tried, also once it is due again."""
        return self._delays[key].error if key in self._delays else None

    @property
    def failing(self) -> frozenset[CapKey]:
        """Knobs that failed when they were last tried."""
        failed = self._delays.items()
        return frozenset(k for k, d in failed if d.error.refusal != RefusalReason.NO_JOURNAL)

    def fail(self, key: CapKey, error: CapsError) -> bool:
        """Do not try a knob before a delay that grows with each failure; True if it is new."""
        persistent = error.refusal in _PERSISTENT
        first = _FIRST_PERSISTENT_DELAY if persistent else _FIRST_DELAY
        longest = _MAX_PERSISTENT_DELAY if persistent else _MAX_DELAY
        if key in self.stuck:  # another call costs nothing: its worker still waits
            longest = _FIRST_DELAY
        elif key in self._unanswered:  # once it returns, it has no cap
            longest = _MAX_ABSENT_DELAY
        earlier = self._delays.get(key)
        length = first if earlier is None else max(first, min(2 * earlier.length, longest))
        self._delays[key] = _RetryDelay(self._clock.monotonic() + length, length, error)
        return earlier is None or str(earlier.error) != str(error)

    def succeed(self, key: CapKey) -> None:
        """End the retry delay of a knob."""
        self._delays.pop(key, None)

    def retry_now(self) -> None:
        """End all retry delays."""
        self._delays.clear()

    def close(self) -> None:
        for actuator in self._actuators.values():
            actuator.close()

    def _call(self, key: CapKey, call: Callable[[ConcurrentActuator], KnobState]) -> KnobState:
        self.stuck.discard(key)
        if key.knob not in self._actuators:
            raise CapsError(
                f"Cannot set {key.knob} of {key.device}: the knob is not in use; name it in"
                " [autotune] knobs.",
                RefusalReason.LOST,
                key.device,
            )
        try:
            state = self.knobs[key] = call(self._actuators[key.knob])
        except ActuatorError as error:
            if error.trouble is Trouble.STUCK:
                self.stuck.add(key)
            raise DeviceError(key, error) from None
        return state


_REASONS = {
    Trouble.DENIED: RefusalReason.NO_PERMISSION,
    Trouble.MALFORMED: RefusalReason.NOT_HONOURED,
}


class DeviceError(CapsError):
    """The error of a device as a refusal."""

    def __init__(self, key: CapKey, error: ActuatorError) -> None:
        reason = _REASONS.get(error.trouble, RefusalReason.LOST)
        super().__init__(str(error), RefusalReason.LOCKED if error.locked else reason, key.device)
        self.trouble = error.trouble
