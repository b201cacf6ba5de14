"""Assembly of tuning and caps: the tuner, the capper, log records, and the part in a fleet."""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from wattspan import __version__
from wattspan.advice.boards import StaticPowerLearner
from wattspan.clock import SystemClock
from wattspan.config import AgentSettings, Config
from wattspan.model import (
    Attribution,
    Consumer,
    HwType,
    Knob,
    RecordedDecision,
    Snapshot,
    Tick,
    TuningAccounts,
)
from wattspan.model.snapshot import FleetAccounts
from wattspan.ports import CapsError, ProcessDirectory, SnapshotView
from wattspan.processes.metadata import RunningProcesses
from wattspan.processes.procfs import ProcFs
from wattspan.service.agent import ServiceGroup
from wattspan.service.capper_process import CapperHealth, CapperProcess
from wattspan.service.configuration import capper_client
from wattspan.service.device_history import DeviceHistory, WindowEdges
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import TUNING, TickObserver
from wattspan.service.sampling_demand import SamplingDemand
from wattspan.sharing.pools import Pools
from wattspan.tuning.declared_jobs import DeclaredJobs
from wattspan.tuning.permissions import GpuPermissions, ProcessOwners, job_owner

if TYPE_CHECKING:
    from wattspan.capper.protocol import CapperClient
    from wattspan.emulation.host import EmulatedHost
    from wattspan.fleet.job_exchange import JobExchange
    from wattspan.otlp.logs import LogForwarder
    from wattspan.storage.tuning import DecisionLog
    from wattspan.tuning.engine_pages import EnginePages
    from wattspan.tuning.host_view import DeviceUsers, HostView
    from wattspan.tuning.tuner import Tuner
    from wattspan.tuning.work_units import ReceivedSpanQueue

Log = Callable[[str], None]

CAPPER_TIMEOUT = 5.0
"""Seconds to wait for a capper, which its service manager may start on demand."""


@dataclass(frozen=True, slots=True)
class AgentCore:
    """The parts of an agent that its services share."""

    config: Config
    clock: SystemClock
    history: EnergyHistory
    devices: DeviceHistory
    directory: ProcessDirectory
    view: SnapshotView
    log: Log
    emulated: EmulatedHost | None
    static_powers: StaticPowerLearner
    demand: SamplingDemand
    pools: Pools = field(default_factory=Pools)
    edges: WindowEdges = field(default_factory=WindowEdges)


@dataclass(slots=True)
class TuningAssembly:
    """The services of tuning and caps; ``services`` are not started yet."""

    core: AgentCore
    services: ServiceGroup = field(default_factory=lambda: ServiceGroup("tuning"))
    observers: dict[str, TickObserver] = field(default_factory=dict)
    tap: ReceivedSpanQueue | None = None
    pages: EnginePages | None = None
    tuner: Tuner | None = None
    decisions: DecisionLog | None = None
    records: LogForwarder | None = None
    declared: DeclaredJobs = field(init=False)
    _needs_capper: bool = field(init=False)
    _users: DeviceUsers = field(init=False)  # if something tunes
    _directory: ProcessDirectory = field(init=False)
    _shared: Path | None = None

    def __post_init__(self) -> None:
        # A job ends with its processes, also if their parent does not notice that they have ended.
        self._directory = RunningProcesses(self.core.directory, ProcFs())
        self._needs_capper = self._wants_limits or self._has_former_limits
        settings = self.core.config.autotune
        permissions = GpuPermissions(settings.gpus, self._host_view)
        self.declared = DeclaredJobs(
            settings, self._directory, secrets.token_hex(8), permissions, self.core.pools
        )
        if settings.mode != "off":
            from wattspan.tuning.work_units import ReceivedSpanQueue

            self.tap = ReceivedSpanQueue(announced=any(job.tracked for job in settings.job))
            if engines := {job.engine for job in settings.job if job.engine}:
                from wattspan.tuning.engine_pages import EnginePages

                self.pages = EnginePages(engines)
        if self._needs_capper or self.tap is not None:
            self._add_records()
        if self._needs_capper:
            self._add_audit()  # before the capper, whose start and end it records
            self._add_capper()
            capper = CapperHealth(self.capper_client)
            self.services.add_thread("wattspan-capper-watch", capper.run)
            self.services.health_checks.append(capper.health)
        if self.tap is not None:
            self._add_tuner(self.tap)

    @property
    def _wants_limits(self) -> bool:
        tuned, caps = self.core.config.autotune, self.core.config.caps
        return (
            tuned.mode == "apply"
            or any(job.mode == "apply" for job in tuned.job if tuned.mode != "off")
            or caps.imposes
            or self.core.config.fleet.is_enabled
        )

    @property
    def _has_former_limits(self) -> bool:
        """True if a former capper of this agent may have left limits that nothing wants now.

        Limits of fixed caps and of a power budget outlive their capper: another one lifts those
        that the configuration does not name any more.
        """
        if not self._starts_capper:
            return False
        from wattspan.capper.host_directory import capper_directory, has_journal

        state_dir = Path(self.core.config.agent.state_dir)
        return has_journal(capper_directory(state_dir, emulated=self._is_emulated))

    @property
    def _starts_capper(self) -> bool:
        """True if the agent may start a capper of its own."""
        capper = self.core.config.caps.capper
        return capper is True or (capper == "auto" and (self._is_emulated or os.geteuid() == 0))

    def accounts(self) -> TuningAccounts:
        """The newest state of tuning. Safe from any thread."""
        if self.tuner is None:
            accounts = TuningAccounts(self.core.config.autotune.mode)
        else:
            accounts = self.tuner.accounts()
        if self.records is None:
            return accounts
        return replace(accounts, forwarded=self.records.sent, forward_drops=self.records.drops)

    def history(
        self, job: str = "", limit: int = 100, since: int | None = None
    ) -> Sequence[RecordedDecision]:
        """Past decisions, oldest first. Safe from any thread."""
        return () if self.decisions is None else self.decisions.recent(job, limit, since)

    # ---------------------------------------------------------------------------------- parts

    @property
    def _is_emulated(self) -> bool:
        return self.core.emulated is not None

    def _add_records(self) -> None:
        """Forward decisions and the capper's actions to the user's collector, if configured."""
        spans = self.core.config.spans
        if not (spans.enabled and spans.forward and spans.forward_decisions):
            return
        from wattspan.otlp.logs import LogForwarder

        resource: dict[str, str | bool] = {
            "service.name": "wattspan",
            "service.version": __version__,
            "host.name": self.core.view().host,
        }
        if self._is_emulated:
            resource["wattspan.emulated"] = True
        records = self.records = LogForwarder(
            spans, self.core.clock, self.core.log, resource, version=__version__
        )
        self.services.add(records.start, records.stop)
        self.services.health_checks.append(lambda: (records.health(),))

    def _add_audit(self) -> None:
        if self.records is None:
            return
        from wattspan.capper.host_directory import audit_path
        from wattspan.service.decision_events import AuditTail, audit_record

        offer = self.records.offer
        tail = AuditTail(
            audit_path(Path(self.core.config.agent.state_dir), emulated=self._is_emulated),
            lambda event: offer(audit_record(event)),
            self.core.clock,
            self.core.log,
        )
        self.services.add(tail.begin, lambda: None)
        self.services.add_thread("wattspan-audited", tail.run)

    def _add_capper(self) -> None:
        """Start a capper as a child process if the agent may and no service does."""
        if not self._starts_capper:
            return
        caps = self.core.config.caps
        from wattspan.config.writing import to_toml

        if "caps.users" not in self.core.config.origins:
            # The capper's own user is always permitted; the default names the service's user,
            # which may not exist.
            caps = msgspec.structs.replace(caps, users=())
        agent, emulated = _absolute(self.core.config.agent), self.core.emulated
        child = CapperProcess(
            self.core.clock,
            () if emulated is None else ("--emulated", str(emulated.directory)),
            to_toml(
                Config(
                    agent=agent,
                    autotune=self.core.config.autotune,
                    caps=caps,
                    fleet=self.core.config.fleet,
                )
            ),
            answered=self._answered,
            log=self.core.log,
            kept=() if emulated is None else emulated.lifeline,
        )
        self.services.add(child.start, child.stop)

    def _answered(self) -> bool:
        """True if a capper answers, for example the system's or another agent's."""
        client = self.capper_client(CAPPER_TIMEOUT)
        try:
            client.rows()
        except CapsError as error:
            if not error.refusal:
                return False
        finally:
            client.close()
        if client.address.shared:
            self._log_shared(client.address.path)
        return True

    def _log_shared(self, path: Path) -> None:
        """Log once that the capper of another agent serves this one."""
        if path == self._shared:
            return
        self._shared, core = path, self.core
        core.log(
            f"The capper of another agent of this host, on {path}, sets the limits of this agent"
            f" too; {core.config.caps.host_dir} names it. Its configuration applies to them."
        )
        if core.config.caps.imposes:
            core.log(
                "The fixed caps and the power budget of this agent's [caps] are not in force. Put"
                " them into the configuration of that capper's agent, or end that agent."
            )

    def capper_client(self, timeout: float = 1.0) -> CapperClient:
        return capper_client(
            self.core.config,
            self.core.clock,
            f"tuner {os.getpid()}",
            timeout=timeout,
            emulated=self._is_emulated,
        )

    def _host_view(self) -> HostView:
        """The host without the capper's rows."""
        from wattspan.tuning.host_view import HostView

        core, history = self.core, self.core.history
        return HostView(
            core.clock.now(), core.view(), history.domains(), history, core.devices, self._users
        )

    def _add_tuner(self, spans: ReceivedSpanQueue) -> None:
        from wattspan.service.decision_events import store_and_send
        from wattspan.service.plan_processes import search_plan
        from wattspan.storage.tuning import (
            CertificationStore,
            DecisionLog,
            RunningAccounts,
            RunningEvidence,
            decisions_path,
        )
        from wattspan.tuning.host_view import DeviceUsers
        from wattspan.tuning.job_context import TuningContext
        from wattspan.tuning.tuner import Tuner

        settings = self.core.config.autotune
        device_users = self._users = DeviceUsers()
        cpu = Knob.CPU_POWER in settings.knobs

        def observe(tick: Tick, _: Sequence[Attribution]) -> None:
            device_users.add(u for u in tick.usages if cpu or not u.resource.startswith("cpu"))

        self.observers[TUNING] = observe
        state_dir, emulated = Path(self.core.config.agent.state_dir), self._is_emulated
        decisions = self.decisions = DecisionLog(
            decisions_path(state_dir, emulated=emulated), self.core.clock, log=self.core.log
        )
        context = TuningContext(
            certified=CertificationStore.open(state_dir, emulated=emulated, log=self.core.log),
            owner_of=ProcessOwners(self._directory),
            accounts=RunningAccounts.open(state_dir, emulated=emulated, log=self.core.log),
            evidence=RunningEvidence.open(state_dir, emulated=emulated, log=self.core.log),
            search_plan=search_plan,
            records=self._add_exchange(),
            command=self._command_of,
            floor=self.core.config.caps.floor_watts * 1000,
            seed=uuid.getnode() & 0xFFFF,
            page_intervals={one.label: one.interval for one in self.core.config.serving.engine},
        )
        self.tuner = Tuner(
            self.core.clock,
            settings,
            spans,
            context,
            host=self._host_view,
            directory=self._directory,
            caps=self.capper_client() if self._needs_capper else None,
            record=decisions.add
            if self.records is None
            else partial(store_and_send, decisions.add, self.records.offer),
            declared=self.declared.tuned,
            pages=tuple if self.pages is None else self.pages.newest,
            pools=self.core.pools,
            log=self.core.log,
        )
        self.services.add_thread("wattspan-tuner", self.tuner.run)
        self.services.health_checks.append(self.tuner.health)

    def _command_of(self, consumer: Consumer) -> str:
        """The command of a job with its owner: certified settings of one owner serve no other."""
        command, owner = job_command(consumer), job_owner(self.core.directory.describe(consumer))
        return f"{owner.label}: {command}" if command and owner is not None else command

    def _add_exchange(self) -> JobExchange | None:
        """The exchange with other hosts of the fleet that have ranks of the same jobs."""
        core, fleet = self.core, self.core.config.fleet
        shared = any(job.on_several_hosts for job in core.config.autotune.job)
        if not (fleet.is_enabled and shared):
            return None
        from wattspan.fleet.etcd import EtcdCoordination
        from wattspan.fleet.job_exchange import JobExchange

        coordination = EtcdCoordination(fleet, core.clock)
        name = fleet.name_of(core.view().host)
        exchange = JobExchange(fleet.prefix, name, coordination, core.clock, core.log)
        self.services.add_thread("wattspan-jobs", exchange.run, timeout=3.0)
        return exchange


def _absolute(agent: AgentSettings) -> AgentSettings:
    """Return ``agent`` with absolute directories: the child has another working directory."""
    paths = {name: str(Path(getattr(agent, name)).absolute()) for name in ("state_dir", "run_dir")}
    return msgspec.structs.replace(agent, **paths)


def job_command(consumer: Consumer) -> str:
    """The digest of a process's command line; "" if it cannot be read."""
    import psutil  # for hosts that tune only: it takes memory

    from wattspan.tuning.decisions.certified_settings import command_digest

    try:
        words = psutil.Process(consumer.pid).cmdline()
    except psutil.Error:
        return ""
    return command_digest([word for word in words if word])


# -------------------------------------------------------------------------------------------- fleet


_CEILING_TIMEOUT = 3.0
"""Seconds of one call to the capper, within which it writes all limits."""
_LIMITED_TYPES = (HwType.GPU, HwType.CPU)


def add_fleet(
    services: ServiceGroup, core: AgentCore, tuning: TuningAssembly, boot_id: str
) -> Callable[[], FleetAccounts | None]:
    """Add the participant in the fleet, if one is configured, to ``services``.

    Returns its newest state; None without a fleet. Safe from any thread.
    """
    config, clock = core.config, core.clock
    if not config.fleet.is_enabled:
        return lambda: None
    # Most hosts are in no fleet: its TLS and HTTP take memory.
    from wattspan.fleet.etcd import EtcdCoordination
    from wattspan.fleet.member import FleetMember, SessionRecord
    from wattspan.fleet.participant import FleetParticipant

    coordination = EtcdCoordination(config.fleet, clock)
    record = SessionRecord(Path(config.agent.state_dir), boot_id)
    reserve = config.caps.reserve_watts * 1000
    member = FleetMember(
        config.fleet.name_of(core.view().host),
        config.fleet,
        coordination,
        tuning.capper_client(_CEILING_TIMEOUT),
        clock,
        power=lambda: limited_power(core.view(), reserve),
        powers=lambda: device_powers(core.view()),
        new_session=lambda: secrets.token_hex(8),
        former_session=record.former,
        note_session=record.note,
        ramp=config.caps.ramp_watts_per_second * 1000,
        largest_step=config.caps.largest_step,
    )
    participant = FleetParticipant(config.fleet, coordination, member, clock, core.log)
    services.add(participant.start, participant.stop)
    services.health_checks.append(participant.health)
    return lambda: participant.status


def limited_power(snapshot: Snapshot, reserve: int) -> int | None:
    """The power of all devices that can be limited, and the reserve, in milliwatts.

    None if there are none, or if the power of one is unknown.
    """
    powers = [
        account.power
        for account in snapshot.cover
        if account.present and account.domain.hw_type in _LIMITED_TYPES
    ]
    if not powers or None in powers:
        return None
    return reserve + sum(power for power in powers if power is not None)


def device_powers(snapshot: Snapshot) -> dict[str, int]:
    """The known power of each present device by id, in milliwatts."""
    return {
        account.domain.id: account.power
        for account in snapshot.cover
        if account.present and account.power is not None
    }
