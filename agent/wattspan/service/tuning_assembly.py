"""The third part of the composition root: the tuner, and the capper it speaks to."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from wattspan import __version__
from wattspan.clock import SystemClock
from wattspan.config import AgentSettings, Config
from wattspan.ingest.export_request import WorkAttribute
from wattspan.model import (
    Attribution,
    Consumer,
    Knob,
    RecordedDecision,
    SourceHealth,
    Tick,
    TuningAccounts,
)
from wattspan.ports import Caps, ProcessDirectory, SnapshotView
from wattspan.service.agent import ServiceGroup
from wattspan.service.capper_health import CapperHealth
from wattspan.service.configuration import is_explicit, run_directory
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.poller import TickObserver
from wattspan.tuning.work_units import ReceivedSpanQueue

if TYPE_CHECKING:
    from wattspan.emulation.host import EmulatedHost
    from wattspan.otlp.logs import LogForwarder
    from wattspan.storage.decisions import DecisionLog
    from wattspan.tuning.tuner import DecisionStore, Tuner

Log = Callable[[str], None]

CAPPER_TIMEOUT = 5.0
"""Seconds in which a capper answers that its service manager starts when somebody knocks."""


@dataclass(slots=True)
class TuningAssembly:
    """Everything that tuning and caps need, put together, and started as one service."""

    config: Config
    clock: SystemClock
    past: EnergyHistory
    directory: ProcessDirectory
    view: SnapshotView
    log: Log
    emulated: EmulatedHost | None = None
    services: ServiceGroup = field(default_factory=lambda: ServiceGroup("tuning"))
    observers: list[TickObserver] = field(default_factory=list)
    tap: ReceivedSpanQueue | None = None
    tuner: Tuner | None = None
    book: DecisionLog | None = None
    records: LogForwarder | None = None
    capper: CapperHealth | None = None

    def __post_init__(self) -> None:
        services = self.services
        if self.config.autotune.mode != "off":
            self.tap = ReceivedSpanQueue()
        if self.wants_caps or self.tap is not None:
            self._add_records(services)
        if self.wants_caps:
            self._add_audit(services)
            self._add_capper(services)
            self.capper = CapperHealth(self._client)
            services.add(self.capper.start, self.capper.stop)
        if self.tap is not None:
            self._add_tuner(services, self.tap)

    @property
    def wants_caps(self) -> bool:
        """Whether anything is configured for which a capper is needed."""
        tuned = self.config.autotune
        caps = self.config.caps
        return (
            tuned.mode == "apply"
            or any(job.mode == "apply" for job in tuned.job if tuned.mode != "off")
            or bool(caps.fixed or caps.budget_watts or caps.budget_file)
        )

    def accounts(self) -> TuningAccounts:
        """The newest state of tuning. Safe from any thread."""
        if self.tuner is None:
            known = TuningAccounts(self.config.autotune.mode)
        else:
            known = self.tuner.accounts()
        if self.records is None:
            return known
        return replace(known, forwarded=self.records.sent, forward_drops=self.records.drops)

    def health(self) -> tuple[SourceHealth, ...]:
        """How what is written to is doing, whoever carries caps out, and the tuner itself."""
        return (
            *((self.records.health(),) if self.records is not None else ()),
            *(self.capper.health() if self.capper is not None else ()),
            *(self.tuner.health() if self.tuner is not None else ()),
        )

    def history(
        self, job: str = "", limit: int = 100, since: int | None = None
    ) -> Sequence[RecordedDecision]:
        """Decisions of the past, oldest first. Safe from any thread."""
        return () if self.book is None else self.book.recent(job, limit, since)

    @property
    def counted(self) -> tuple[WorkAttribute, ...]:
        """Which spans count their work, and in which attribute."""
        return tuple(
            WorkAttribute(job.work, job.service, job.span)
            for job in self.config.autotune.job
            if job.work not in ("", "tokens")
        )

    # ---------------------------------------------------------------------------------- parts

    @property
    def socket(self) -> Path:
        from wattspan.capper.paths import capper_socket_path

        return capper_socket_path(run_directory(self.config), emulated=self.emulated is not None)

    def _add_records(self, services: ServiceGroup) -> None:
        """The way to the user's collector, for what is decided and what is written."""
        spans = self.config.spans
        if not (spans.enabled and spans.forward and spans.forward_decisions):
            return
        from wattspan.otlp.logs import LogForwarder

        resource: dict[str, str | bool] = {
            "service.name": "wattspan",
            "service.version": __version__,
            "host.name": self.view().host,
        }
        if self.emulated is not None:
            resource["wattspan.emulated"] = True
        self.records = LogForwarder(spans, self.clock, self.log, resource, version=__version__)
        services.add(self.records.start, self.records.stop)

    def _add_audit(self, services: ServiceGroup) -> None:
        """Before the capper, so that nothing is missed of it from its first line to its last."""
        if self.records is None:
            return
        from wattspan.capper.paths import audit_path
        from wattspan.service.audit_tail import AuditTail
        from wattspan.service.decision_events import audit_record

        offer = self.records.offer
        tail = AuditTail(
            audit_path(Path(self.config.agent.state_dir), emulated=self.emulated is not None),
            lambda event: offer(audit_record(event)),
            self.clock,
            self.log,
        )
        stop = threading.Event()
        thread = threading.Thread(
            target=tail.run, args=(stop,), name="wattspan-audited", daemon=True
        )

        def start() -> None:
            tail.begin()
            thread.start()

        def end() -> None:
            stop.set()
            thread.join()

        services.add(start, end)

    def _add_capper(self, services: ServiceGroup) -> None:
        caps = self.config.caps
        mine = caps.capper is True or (
            caps.capper == "auto" and (self.emulated is not None or os.geteuid() == 0)
        )
        if not mine:
            return
        from wattspan.config.writing import to_toml
        from wattspan.service.capper_process import CapperProcess

        if not is_explicit(self.config, "caps.users"):
            # Its own user always may; the default names the service's, which may not be there.
            caps = msgspec.structs.replace(caps, users=())
        agent = _absolute(self.config.agent)
        child = CapperProcess(
            self.clock,
            ("--emulated", str(self.emulated.directory)) if self.emulated is not None else (),
            to_toml(Config(agent=agent, autotune=self.config.autotune, caps=caps)),
            answered=self._answered,
            log=self.log,
        )
        services.add(child.start, child.stop)

    def _answered(self) -> bool:
        """Whether a capper listens already: the system's, which is nobody's child."""
        from wattspan.ports import CapsError

        client = self._client(CAPPER_TIMEOUT)
        try:
            client.rows()
        except CapsError as error:
            return bool(error.refusal)
        finally:
            client.close()
        return True

    def _client(self, timeout: float = 1.0) -> Caps:
        from wattspan.capper.client import CapperClient

        who = f"tuner {os.getpid()}"
        return CapperClient(self.socket, self.clock, who=who, timeout=timeout)

    def _add_tuner(self, services: ServiceGroup, tap: ReceivedSpanQueue) -> None:
        from wattspan.storage.decisions import CertificationStore, DecisionLog, decisions_path
        from wattspan.tuning.host_view import DeviceUsers
        from wattspan.tuning.tuner import Tuner

        tuned = self.config.autotune
        tenants = DeviceUsers()
        cpu = Knob.CPU_POWER in tuned.knobs

        def observe(tick: Tick, _: Sequence[Attribution]) -> None:
            tenants.see(u for u in tick.usages if cpu or not u.resource.startswith("cpu"))

        self.observers.append(observe)
        state_dir = Path(self.config.agent.state_dir)
        emulated = self.emulated is not None
        self.book = DecisionLog(
            decisions_path(state_dir, emulated=emulated), self.clock, log=self.log
        )
        self.tuner = Tuner(
            self.clock,
            tuned,
            tap,
            past=self.past,
            tenants=tenants,
            view=self.view,
            directory=self.directory,
            caps=self._client() if self.wants_caps else None,
            book=self._told(self.book),
            memory=CertificationStore.open(state_dir, emulated=emulated, log=self.log),
            command=command_line,
            floor=self.config.caps.floor_watts * 1000,
            seed=uuid.getnode() & 0xFFFF,
            log=self.log,
        )
        services.add_thread("wattspan-tuner", self.tuner.run)

    def _told(self, book: DecisionLog) -> DecisionStore:
        """``book``, by which the user's collector is told too, if there is one."""
        if self.records is None:
            return book
        from wattspan.service.decision_events import ForwardedDecisions

        return ForwardedDecisions(book, self.records.offer)


def _absolute(agent: AgentSettings) -> AgentSettings:
    """The directories from /, because a child process has another working directory."""
    places = {name: str(Path(getattr(agent, name)).absolute()) for name in ("state_dir", "run_dir")}
    return msgspec.structs.replace(agent, **places)


def command_line(consumer: Consumer) -> str:
    """What tells one job from another: the digest of its command line; "" if it cannot be read."""
    from wattspan.tuning.decisions.certified import command_digest

    try:
        raw = Path(f"/proc/{consumer.pid}/cmdline").read_bytes()
    except OSError:
        return ""
    words = [word.decode("utf-8", "replace") for word in raw.split(b"\0") if word]
    return command_digest(words)
