"""The services that tuning jobs share: stores, searches, records; the strategy's interface."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wattspan.model import Consumer, Decision, Knob, TuningFigures, TuningRow
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.tuning.decisions.load_tracking import TrackingEvidence, TrackingPolicy
from wattspan.tuning.decisions.search import TunerState
from wattspan.tuning.decisions.values import CertifiedLevels, Fingerprint, KnobRange
from wattspan.tuning.host_view import HostView
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


class PlanSearches(Protocol):
    """Searches clocks for the ranks of pipelines, which takes up to seconds each."""

    def submit(self, task: PlanTask) -> Future[ClockPlan | None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningContext:
    """Services of all jobs of this host.

    ``command`` identifies the program of a process. No cap of any kind is lower than ``floor``, in
    milliwatts.
    """

    certified: CertifiedStore
    owner_of: Callable[[Consumer], JobOwner | None]
    accounts: AccountStore
    evidence: EvidenceStore
    plans: PlanSearches
    records: JobRecords | None = None
    command: Callable[[Consumer], str] = lambda _: ""
    floor: int = 0
    seed: int = 0


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
        ...

    def step(self, host: HostView, *, may_explore: bool) -> tuple[Decision, TuningFigures]:
        """Take one step; a strategy that cannot continue stops itself, and decides why."""
        ...

    def stop(self, *, forget: bool = False) -> None:
        """Drop the present state; ``forget`` what the next one would continue with, too."""
        ...

    def describe(self, row: TuningRow) -> TuningRow:
        """The job's row with the figures of this strategy."""
        ...

    def store(self, decision: Decision | None) -> None:
        """Store for the next run what a new ``decision`` reports; all of it for None."""
        ...
