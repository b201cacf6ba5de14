"""The second half of the composition root: what receives spans, joins them, answers questions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from wattspan import __version__
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.http.connection_limiter import Endpoint, RejectionCounter, UidOf, unknown_uid
from wattspan.model import Checkpoint, SourceHealth
from wattspan.ports import Clock, ListenError, ProcessDirectory, SnapshotView
from wattspan.service.agent import ServiceGroup
from wattspan.service.configuration import is_explicit, run_directory
from wattspan.service.energy_history import EnergyHistory

if TYPE_CHECKING:
    from wattspan.http.server import HttpServer
    from wattspan.ingest.side_channel import SideChannelServer
    from wattspan.otlp.forwarder import Forwarder
    from wattspan.processes.cpu_sampler import CpuSampler
    from wattspan.processes.inspector import TcpConnections
    from wattspan.service.joiner import SpanJoiner
    from wattspan.service.tuning_assembly import TuningAssembly

Log = Callable[[str], None]


_LOOKUP_TIME_SHARE = 4
"""Part of the time that may go into looking up the owners of TCP connections: one in so many."""


class ConnectionOwnerLookup:
    """Looks up the owner of a TCP socket of this host; None for no owner. Safe from any thread.

    A kernel that cannot be asked directly has its table of all connections read, which takes
    milliseconds: where that becomes too much, the owner is None as well.
    """

    def __init__(self, clock: Clock) -> None:
        from wattspan.ingest.process_lookup import LookupBudget

        self._looking = LookupBudget(clock, _LOOKUP_TIME_SHARE)
        self._lock = threading.Lock()
        self._connections: TcpConnections | None = None

    def __call__(self, end: Endpoint, other: Endpoint) -> int | None:
        from wattspan.processes.inspector import TcpConnections

        with self._lock, self._looking as allowed:
            if not allowed:
                return None
            if self._connections is None:
                self._connections = TcpConnections()
            owner = self._connections.owner_of(end, other)
        return None if owner is None else owner.user

    def close(self) -> None:
        """Let go of the connection to the kernel; the next look-up makes another."""
        with self._lock:
            if self._connections is not None:
                self._connections.close()
                self._connections = None


@dataclass(slots=True)
class SpanAssembly:
    """Everything that spans and questions need, put together, and started as one service."""

    config: Config
    clock: SystemClock
    past: EnergyHistory
    directory: ProcessDirectory
    host: str
    log: Log
    view: SnapshotView
    opening: Checkpoint | None = None
    workshop: TuningAssembly | None = None
    forwarder: Forwarder | None = None
    refusals: RejectionCounter = field(default_factory=RejectionCounter)
    uid_of: UidOf = unknown_uid

    def health(self) -> tuple[SourceHealth, ...]:
        """How what is written to is doing."""
        mine = () if self.forwarder is None else (self.forwarder.health(),)
        return mine if self.workshop is None else (*mine, *self.workshop.health())

    def services(self) -> tuple[ServiceGroup, SpanJoiner | None]:
        """The services, not started yet; and who knows the totals, if spans are received."""
        spans = self.config.spans.enabled
        if not spans and not self.config.agent.api:
            return ServiceGroup("spans"), None
        services = ServiceGroup("spans")
        joiner = self._add_spans(services) if spans else None
        self._add_web(services, joiner)
        return services, joiner

    # ---------------------------------------------------------------------------------- parts

    def _add_spans(self, services: ServiceGroup) -> SpanJoiner:
        from wattspan.ingest.identity_verification import IdentityResolver
        from wattspan.processes.cpu_sampler import CpuSampler
        from wattspan.processes.inspector import ProcessInspector
        from wattspan.service.joiner import SpanJoiner

        settings = self.config.spans
        fine = CpuSampler(self.clock, settings.resolution)
        services.add(fine.start, fine.stop)
        witness = ProcessInspector()
        services.add(lambda: None, witness.close)
        self.forwarder = self._open_forwarder()
        if self.forwarder is not None:
            services.add(self.forwarder.start, self.forwarder.stop)
        feed = self._feed(services) if settings.unix else None
        joiner = SpanJoiner(
            self.clock,
            self.past,
            IdentityResolver(self.clock, witness),
            buffer=settings.buffer,
            open_spans=settings.open_spans,
            names=settings.names,
            history=self.config.agent.history,
            weight=settings.weight,
            feed=feed,
            fine=fine,
            onward=self.forwarder,
            tap=self.workshop.tap if self.workshop is not None else None,
            opening=self.opening,
            log=self.log,
        )
        stop = threading.Event()
        thread = threading.Thread(
            target=joiner.run, args=(stop,), name="wattspan-joiner", daemon=True
        )

        def end() -> None:
            stop.set()
            thread.join()

        services.add(thread.start, end)
        return joiner

    def _open_forwarder(self) -> Forwarder | None:
        if not self.config.spans.forward:
            return None
        from wattspan.otlp.forwarder import Forwarder

        return Forwarder(
            self.config.spans,
            self.clock,
            self.log,
            Path(self.config.agent.state_dir) / "forward",
            provenance=lambda: self.view().provenance,
            version=__version__,
        )

    def _feed(self, services: ServiceGroup) -> SideChannelServer:
        from wattspan.ingest.side_channel import SideChannelServer

        feed = SideChannelServer(self.run_dir / "feed.sock")

        def start() -> None:
            try:
                feed.start()
            except ListenError as error:
                self._without("spans.unix", error)

        services.add(start, feed.stop)
        return feed

    def _add_web(self, services: ServiceGroup, joiner: SpanJoiner | None) -> None:
        from wattspan.http.limits import ServerLimits
        from wattspan.http.server import HttpServer
        from wattspan.processes.cpu_sampler import CpuSampler

        settings = self.config
        limits = ServerLimits(body=settings.spans.max_request, rate=settings.agent.max_rate)
        server = HttpServer(self.clock, log=self.log, limits=limits, uid_of=self.uid_of)

        # Not the spans' own: who is let go by one of them is not by the other.
        fine = CpuSampler(self.clock, self.config.spans.resolution)
        if self.config.agent.api:
            services.add(fine.start, fine.stop)

        def start() -> None:
            if joiner is not None:
                self._listen_for_spans(server, joiner, services)
            if self.config.agent.api:
                self._listen_for_questions(server, services, fine)
            server.start()

        # The server makes its sockets while it starts: whatever fails then, they are removed.
        services.add(lambda: None, server.stop)
        services.add(start, lambda: None)

    def _listen_for_spans(
        self, server: HttpServer, joiner: SpanJoiner, services: ServiceGroup
    ) -> None:
        from wattspan.ingest.listeners import open_receivers

        addresses = open_receivers(
            server,
            self.config.spans,
            self.run_dir,
            joiner,
            self.clock,
            asked=lambda key: self._asked(f"spans.{key}"),
            log=self.log,
            work=self.workshop.counted if self.workshop is not None else (),
            refusals=self.refusals,
        )
        services.reached.extend(addresses)
        from wattspan.otlp.destination import check_destination
        from wattspan.service.destinations import destinations

        for destination in destinations(self.config):
            check_destination(destination, addresses)

    def _listen_for_questions(
        self, server: HttpServer, services: ServiceGroup, fine: CpuSampler
    ) -> None:
        from wattspan.api.service import QueryService
        from wattspan.http.access_policy import AccessPolicy

        service = QueryService(
            self.past,
            self.directory,
            self.clock,
            view=self.view,
            host=self.host,
            version=__version__,
            resolution=self.config.agent.api_resolution,
            fine=fine,
            tuning=self.workshop.accounts if self.workshop is not None else None,
            history=self.workshop.history if self.workshop is not None else None,
        )
        try:
            at = server.listen_unix(
                self.run_dir / "api.sock",
                service,
                what="questions",
                door=AccessPolicy(self.refusals.of("api")),
            )
        except ListenError as error:
            self._without("agent.api", error)
        else:
            services.reached.append(at)

    # -------------------------------------------------------------------------------- details

    @property
    def run_dir(self) -> Path:
        return run_directory(self.config)

    def _asked(self, key: str) -> bool:
        return is_explicit(self.config, key)

    def _without(self, key: str, error: ListenError) -> None:
        if self._asked(key):
            raise error
        self.log(f"Going on without it: {error}")
