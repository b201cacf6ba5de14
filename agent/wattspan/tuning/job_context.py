"""The services that tuning jobs share: stores, searches, records; the strategy's interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from wattspan.config import AutotuneSettings
from wattspan.model import (
    SECOND,
    CapKey,
    Consumer,
    Decision,
    DecisionReason,
    Knob,
    Payer,
    TuningFigures,
    TuningRow,
)
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.load_tracking import TrackingEvidence, TrackingPolicy
from wattspan.tuning.decisions.search import TunerState
from wattspan.tuning.decisions.values import CertifiedLevels, Fingerprint, KnobRange
from wattspan.tuning.host_view import DeviceSampler, HostView
from wattspan.tuning.permissions import JobOwner

if TYPE_CHECKING:
    from wattspan.tuning.host_turns import JobRecords
    from wattspan.tuning.pipeline.plan import ClockPlan
    from wattspan.tuning.pipeline.session_state import PlanTask


class CertifiedStore(Protocol):
    """Stores certified settings by fingerprint."""

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None: ...

    def certified(self, fingerprint: Fingerprint, knob: Knob, setting: CertifiedLevels) -> None: ...

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> None: ...


class AccountStore(Protocol):
    """Stores the closed slowdown accounts of running jobs by name and processes."""

    def recall(self, job: str, processes: Collection[Consumer]) -> SlowdownAccount | None: ...

    def store(
        self, job: str, processes: Collection[Consumer], account: SlowdownAccount
    ) -> None: ...


class EvidenceStore(Protocol):
    """Stores the evidence about the loads of running servers by name and processes."""

    def recall(
        self, job: str, processes: Collection[Consumer], policy: TrackingPolicy
    ) -> TrackingEvidence | None: ...

    def store(
        self,
        job: str,
        processes: Collection[Consumer],
        policy: TrackingPolicy,
        evidence: TrackingEvidence,
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningContext:
    """Services of all jobs of this host.

    ``search_plan`` begins to search clocks for the ranks of a pipeline, which takes up to seconds.
    ``command`` identifies the program of a process. No cap of any kind is lower than ``floor``, in
    milliwatts. ``page_intervals`` are those at which the pages of engines are read.
    """

    certified: CertifiedStore
    owner_of: Callable[[Consumer], JobOwner | None]
    accounts: AccountStore
    evidence: EvidenceStore
    search_plan: Callable[[PlanTask], Future[ClockPlan | None]]
    records: JobRecords | None = None
    command: Callable[[Consumer], str] = lambda _: ""
    floor: int = 0
    seed: int = 0
    page_intervals: Mapping[str, int] = field(default_factory=dict)


class Strategy(Protocol):
    """Decides for the devices of one job, from ``begin`` to ``stop``.

    ``applied`` is True if decisions are applied, else they are advice. ``exploring`` is True if it
    needs the host's permission to explore. ``account`` is the account of the run with the present
    estimates as final figures, None if it keeps none now. ``state`` is that of a search, None for
    other strategies. ``clock_only``: only the clocks of GPUs are tuned, if they are configured.
    """

    clock_only: bool

    @property
    def state(self) -> TunerState | None: ...

    @property
    def running(self) -> bool: ...

    @property
    def applied(self) -> bool: ...

    @property
    def exploring(self) -> bool: ...

    @property
    def account(self) -> SlowdownAccount | None: ...

    def begin(self, host: HostView, ranges: Sequence[KnobRange], *, apply: bool) -> Decision | None:
        """Begin with these ranges of the job's devices; or the decision against it."""

    def step(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """Take one step; a strategy that cannot continue stops itself, and decides why."""

    def stop(self, *, forget: bool = False) -> None:
        """Drop the present state; ``forget`` what the next one would continue with, too."""

    def describe(self, row: TuningRow) -> TuningRow:
        """The job's row with the figures of this strategy."""

    def store(self, decision: Decision | None) -> None:
        """Store for the next run what a new ``decision`` reports; all of it for None."""


# ------------------------------------------------------------------------------------------ devices


_FAMILY_INTERVAL = 5 * SECOND

_FINAL_REASONS = frozenset(
    {
        DecisionReason.NOT_BINDING,
        DecisionReason.INERT,
        DecisionReason.NO_SAVING,
        DecisionReason.NO_ROOM,
        DecisionReason.NO_DEVICE,
        DecisionReason.NOT_MONOTONE,
    }
)
"""Reasons against one knob that need not hold for another."""


class DeviceChoice(NamedTuple):
    """Devices and the position of their knob, and all that a tuner of them depends on.

    ``ceilings`` are the settings of the devices without a tuner, ``floors`` the lowest ones that
    they have taken.
    """

    position: int
    devices: tuple[str, ...]
    apply: bool
    ceilings: tuple[int | None, ...]
    floors: tuple[int, ...]


class JobDevices:
    """Belongs to the tuner's thread.

    ``sampler`` reads the caps and the energy of the devices with ``ranges``. ``passed`` are the
    knobs that were of no use, with the reason.
    """

    def __init__(self, owner: JobOwner, context: TuningContext, now: int) -> None:
        self._owner, self._context = owner, context
        self._settings = AutotuneSettings()
        self._lowest_power = 0
        self.members: dict[Payer, int] = {}  # every process of the job's families, and its rank
        self._members_read_at = 0
        self._position = self._first = 0  # in ``knobs``: the present one, the first worth trying
        self._rounds = self._round_ends = 0  # rounds in which no knob was of use
        self._bounds: tuple[tuple[int | None, ...], tuple[int, ...]] = (), ()
        self._floors: dict[CapKey, int] = {}  # firmware may raise a limit that is written
        self._partition_modes: Mapping[str, str] = {}  # in all of the evidence
        self.passed: Mapping[Knob, DecisionReason] = {}
        self.ranges: tuple[KnobRange, ...] = ()
        self.sampler = DeviceSampler(Knob.GPU_POWER, (), now, 0)

    def use_settings(self, settings: AutotuneSettings, lowest_power: int) -> None:
        """Use the knobs of ``settings``; no GPU has a lower limit than ``lowest_power`` (mW)."""
        self._settings, self._lowest_power = settings, lowest_power

    # ------------------------------------------------------------------------------ members

    def update_members(self, host: HostView, ranks: Mapping[Consumer, int]) -> None:
        """Update the processes of the job's families.

        The GPU work of a server may be done by another process than the one that sends spans.
        """
        now = host.now.mono
        known = ranks.keys() <= self.members.keys()
        if known and now - self._members_read_at < _FAMILY_INTERVAL:
            return
        self._members_read_at = now
        self.members = dict(ranks.items())
        for leader, rank in ranks.items():
            for one in filter(self._is_own, host.energies.family(leader)):
                self.members.setdefault(one, rank)

    def _is_own(self, payer: Payer) -> bool:
        """True if a descendant of the job's processes is its owner's.

        Root may start processes of other users; others may have started a setuid program.
        """
        if self._owner.principal.is_host_root or not isinstance(payer, Consumer):
            return True
        owner = self._context.owner_of(payer)
        return owner is not None and owner.principal == self._owner.principal

    # ------------------------------------------------------------------------------- knobs

    @property
    def knobs(self) -> tuple[Knob, ...]:
        return self._settings.knobs

    @property
    def knob(self) -> Knob:
        return self.knobs[self._position]

    def use_knob(self, *, clock: bool) -> None:
        """Begin with the first knob, or with that of GPU clocks if it is configured."""
        first = clock and Knob.GPU_CLOCK in self.knobs
        self._use_position(self.knobs.index(Knob.GPU_CLOCK) if first else 0)

    def try_next_knob(self, reason: DecisionReason, now: int) -> bool:
        """Use the next knob, if the present one is of no use for ``reason``; True if it is used.

        After the last one, the first is used again when the round has ended, after a long time.
        """
        if reason not in _FINAL_REASONS or len(self.knobs) < 2:
            return False
        if self._position + 1 < len(self.knobs):
            return self.skip_knob(reason)
        self._rounds += 1
        self._round_ends = now + (self._settings.dwell << min(self._rounds, 6))
        return False

    def skip_knob(self, reason: DecisionReason) -> bool:
        """Use the next knob, or the first after the last, if there is another one.

        True if it is used.
        """
        if len(self.knobs) < 2:
            return False
        passed = {**self.passed, self.knob: reason}
        self._use_position((self._position + 1) % len(self.knobs))
        self.passed = passed if self._position else {}
        return True

    def continue_round(self) -> None:
        """Do not end the round of knobs: another decision was taken since."""
        self._round_ends = 0

    def round_has_ended(self, now: int) -> bool:
        """True if the knobs are worth another try: the job's power may have changed since."""
        return 0 < self._round_ends <= now

    def _use_position(self, position: int) -> None:
        self._position = self._first = position
        self.passed, self.ranges, self._round_ends = {}, (), 0

    # ----------------------------------------------------------------------------- devices

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.device for one in self.ranges)

    def choose(
        self, host: HostView, used: Mapping[str, set[Payer]], *, apply: bool
    ) -> DeviceChoice:
        """The devices of the resources ``used`` that may have a knob, with the first such knob.

        A knob that these devices have, with a readable range, comes before those that they lack. A
        job that uses no device at the moment keeps its devices. Caps are applied if ``apply`` and
        the capper can write all of them.
        """
        position, devices, lacking = self._position, self.names, False
        for number in range(self._first, len(self.knobs)):
            found = tuple(host.devices_of(self.knobs[number], used))
            readable = all(host.range(key, 0, 0, 0) for key in self._keys(number, found))
            if found and (readable or not lacking):
                position, devices, lacking = number, found, not readable
            if devices and not lacking and (found or number == self._position):
                break
        keys = self._keys(position, devices)
        usable = apply and host.trouble is None and all(map(host.is_usable, keys))
        for key in keys:
            row = host.rows.get(key)
            least = 0 if row is None else row.state.minimum or 0
            self._floors[key] = max(self._floors.get(key, 0), least)
        ceilings, floors = map(host.highest, keys), map(self._floors.__getitem__, keys)
        return DeviceChoice(position, devices, usable, tuple(ceilings), tuple(floors))

    def refusal(
        self, host: HostView, choice: DeviceChoice, job: str
    ) -> tuple[DecisionReason, str] | None:
        """A reason why the job must not be tuned on these devices, and its sentence."""
        gpus = self._settings.gpus
        refused = [one for one in choice.devices if not host.allowed(one, gpus)]
        if refused:
            return DecisionReason.NOT_ALLOWED, (
                f"{job} uses {host.display_name(refused[0])}, which is not in [autotune] "
                f"gpus ({', '.join(gpus)})."
            )
        keys = self._keys(choice.position, choice.devices)
        holder = next(filter(None, (host.other_holder(key, job) for key in keys)), "")
        if holder:
            return DecisionReason.HELD, (
                f"{job} is not tuned: {holder} holds the cap of one of its devices; see "
                "`wattspan caps status`."
            )
        return None

    def are(self, choice: DeviceChoice, *, applied: bool) -> bool:
        """True if the present devices are those of the choice, and a tuner of them may continue."""
        return bool(choice.devices) and choice == (
            self._position, self.names, applied, *self._bounds
        )  # fmt: skip

    def use(self, host: HostView, choice: DeviceChoice, used: Mapping[str, set[Payer]]) -> bool:
        """Use the chosen devices from now on; False if one of their ranges is not readable."""
        keys = self._keys(choice.position, choice.devices)
        ranges = tuple(one for key in keys if (one := self._range(host, key, used)) is not None)
        if not ranges or len(ranges) < len(keys):
            return False
        self._position, self.ranges, self._bounds = choice.position, ranges, choice[3:]
        self.sampler = DeviceSampler(self.knob, ranges, host.now.mono, host.energies.settled())
        return True

    def clear(self) -> None:
        """Use no device until the next choice."""
        self.ranges = ()

    def _keys(self, position: int, devices: Sequence[str]) -> list[CapKey]:
        return [CapKey(self.knobs[position], one) for one in devices]

    def _range(
        self, host: HostView, key: CapKey, used: Mapping[str, set[Payer]]
    ) -> KnobRange | None:
        """The range of a device, with the lowest rank of the job's processes that use it."""
        domain = host.domains.get(key.device)
        users = used.get(domain.resource or "", ()) if domain is not None else ()
        rank = min((self.members[one] for one in users), default=0)
        floor = max(self._context.floor, self._floors.get(key, 0))
        if key.knob is Knob.GPU_POWER:
            floor = max(floor, self._lowest_power)
        return host.range(key, self._settings.floor, floor, rank)

    # ------------------------------------------------------------------------------- state

    def vetoes(
        self, host: HostView, members: Collection[Payer], *, whole_boards: bool
    ) -> set[DecisionReason]:
        """External reasons not to tune the devices now, whose tenants may be ``members`` only.

        ``whole_boards`` permits MIG if all tenants of the instances belong to this job.
        """
        vetoes = host.vetoes(self.knob, self.names)
        divided = [one for one in self.names if (gpu := host.gpu(one)) and gpu.mig]
        if whole_boards and all(host.is_whole(one, self.members) for one in divided):
            vetoes.discard(DecisionReason.MIG)
        if any(host.is_shared(key, members) for key in self._keys(self._position, self.names)):
            vetoes.add(DecisionReason.SHARED)
        return vetoes

    def changed_mode(self, host: HostView) -> str:
        """The device with another partition mode than before, as a clause; "" for none."""
        former = self._partition_modes
        known = {one: former[one] for one in self.names if one in former}
        present = host.partition_modes(self.names)
        self._partition_modes = known | present
        changed = next((one for one, mode in present.items() if known.get(one, mode) != mode), None)
        if changed is None:
            return ""
        modes = f"{known[changed]} to {present[changed]}"
        return f"the partition mode of {host.display_name(changed)} has changed from {modes}"

    def unusable(self, host: HostView) -> str:
        """The trouble of a knob that the capper cannot write; "" for none."""
        keys = self._keys(self._position, self.names)
        rows = [row for row in map(host.rows.get, keys) if row is not None]
        return next((row.trouble for row in rows if not row.usable), "")
