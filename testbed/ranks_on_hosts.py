"""A synchronous job whose ranks run on several hosts of numbers, and the service of their records.

The hosts have tuners and exchanges of their own; their clocks pass equally.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from urllib.parse import quote

from testbed.hosts_in_step import ExchangingHost, HostsInStep
from testbed.memory_cluster import MemoryCluster
from testbed.tuned_host import DEFAULT, Host, quick
from testbed.tuned_ranks import SERVICE, STEP, RankJob, Together
from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import Consumer, DecisionReason, TuningRow

JOB = f"{SERVICE}/{STEP}"
_SEARCHING = (
    DecisionReason.SCREENING,
    DecisionReason.CERTIFYING,
    DecisionReason.RECERTIFYING,
)


def spread(hosts: int, *others: TunedJobSettings, **more: object) -> AutotuneSettings:
    """Settings of a job whose ranks run on so many hosts, and of others, with short blocks."""
    job = TunedJobSettings(service=SERVICE, span=STEP, kind="steps", hosts=hosts)
    short = {"block": 500_000_000, "settle": 500_000_000, "dwell": 60_000_000_000}
    return quick(**({"job": (job, *others)} | short | more))


def searches(row: TuningRow | None) -> bool:
    """True if the job compares a setting that it has not certified yet."""
    return row is not None and row.decision.reason in _SEARCHING and row.held_slowdown is None


def place_of(job: str) -> str:
    """The prefix of the keys of a job."""
    return f"/fleet-jobs/{quote(job, safe='')}/"


EXPLORER = f"{place_of(JOB)}explorer"
"""The key of the host whose turn it is to compare settings."""


class RankHost(ExchangingHost):
    """One of the hosts, with one rank."""

    def __init__(
        self,
        name: str,
        settings: AutotuneSettings,
        cluster: MemoryCluster,
        seed: int,
        gpus: int = 1,
    ) -> None:
        super().__init__(name, cluster)
        self.host = Host(gpus, settings=settings, records=self.new_exchange, seed=seed)

    @property
    def row(self) -> TuningRow | None:
        return self.host.row(JOB)

    @property
    def cap(self) -> int:
        return self.host.gpus[0].cap

    @property
    def compares(self) -> bool:
        """True if its running agent compares settings, also the one that it has certified."""
        compared = *_SEARCHING, DecisionReason.SENTINEL
        return self.runs and self.row is not None and self.row.decision.reason in compared

    @property
    def holds(self) -> bool:
        """True if it has certified a setting that is in force."""
        certified = self.row is not None and self.row.decision.reason is DecisionReason.CERTIFIED
        return self.runs and certified and self.cap < DEFAULT


class RankedHosts(HostsInStep[RankHost]):
    """Hosts with one rank of the same job each; those in ``later`` have no agent at first."""

    def __init__(
        self, loads: Sequence[float], settings: AutotuneSettings | None = None,
        later: Collection[int] = (), cluster: MemoryCluster | None = None, gpus: int = 1,
        **more: object,
    ) -> None:  # fmt: skip
        super().__init__(cluster)
        self._observer = self.cluster.client()
        settings = settings or spread(len(loads))
        self.members = [
            RankHost(f"host-{number}", settings, self.cluster, number + 1, gpus)
            for number in range(len(loads))
        ]
        used = [one.host.gpus[0] for one in self.members]
        self.together = Together(used, list(loads), **more)  # type: ignore[arg-type]
        ranks = [
            RankJob(SERVICE, gpu, Consumer(200, 1), together=self.together, number=number)
            for number, gpu in enumerate(used)
        ]
        ranks[0].peers = ranks
        for one, rank in zip(self.members, ranks, strict=True):
            one.host.jobs.append(rank)
        for number in later:
            self.members[number].runs = False
        self._start = self.members[0].host.clock.monotonic()

    @property
    def hosts(self) -> list[Host]:
        return [one.host for one in self.members]

    @property
    def elapsed(self) -> float:
        return (self.hosts[0].clock.monotonic() - self._start) / 1e9

    @property
    def explorer(self) -> str:
        """The host whose turn it is to compare settings."""
        entries = self._observer.read(EXPLORER).entries
        return entries[0].value.decode() if entries else ""

    @property
    def lost(self) -> float:
        """The seconds by which the run so far is longer than it would be without any cap."""
        return self.elapsed - self.together.usual


def row(hosts: RankedHosts, number: int) -> TuningRow:
    """The row of the job on a host that has one."""
    found = hosts.members[number].row
    assert found is not None
    return found
