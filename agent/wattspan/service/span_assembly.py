"""Assembly of spans and queries: receivers, joiner, forwarder and query service.

Queries show the state of the capper and the stored energy to users who may read neither themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattspan import __version__
from wattspan.http.limits import RejectionCounter, ServerLimits
from wattspan.http.sockets import Endpoint, listen_unix
from wattspan.model import Checkpoint, Consumer, Principal, SpanAccounts
from wattspan.ports import Clock, ListenError
from wattspan.processes.cpu_sampler import CpuSampler
from wattspan.processes.principals import PrincipalResolver
from wattspan.processes.procfs import ProcFs
from wattspan.service.agent import ServiceGroup
from wattspan.service.configuration import (
    capper_client,
    destinations,
    run_directory,
    second_listener,
)
from wattspan.service.sampling_demand import QUERY_TIME, WINDOW_EXPIRY, Reason
from wattspan.service.tuning_assembly import CAPPER_TIMEOUT, AgentCore, TuningAssembly
from wattspan.util.text import MAX_USER, clean_label
from wattspan.util.unix_sockets import user_name

if TYPE_CHECKING:
    from wattspan.config import Config
    from wattspan.http.messages import HttpRequest, HttpResponse
    from wattspan.http.server import HttpServer
    from wattspan.ingest.side_channel import SideChannelServer
    from wattspan.otlp.forwarder import Forwarder
    from wattspan.processes.inspector import TcpConnections
    from wattspan.service.span_joiner import SpanJoiner


def capper_state(config: Config, clock: Clock, *, emulated: bool) -> Mapping[str, Any]:
    """The fields of a running capper's state, and its socket; CapsError if it does not answer.

    It starts none: a capper wakes the drivers of all devices.
    """
    import msgspec

    # Only a request needs this module, which takes memory.
    from wattspan.capper.host_directory import HostDirectory

    host = None if emulated else HostDirectory(Path(config.caps.host_dir))
    if host is not None and host.address() is None:
        return {}
    who = "wattspan caps status, through the agent"
    client = capper_client(config, clock, who, timeout=CAPPER_TIMEOUT, emulated=emulated)
    if emulated and not client.address.path.exists():
        return {}
    with closing(client):
        client.rows()
        facts: dict[str, Any] = msgspec.to_builtins(client.state)
    return {"socket": str(client.address.path), "state": facts}


def stored_energy(
    config: Config, start: int, end: int, kinds: frozenset[str], user: int | None, *, emulated: bool
) -> Mapping[str, Any]:
    """The path of the agent's store and its extract, without spans and rates. StoreError.

    It is read as by other processes: nothing of it blocks the writer.
    """
    from wattspan.storage.database import store_path
    from wattspan.storage.query import (
        HistoryExtract,
        extract_history,
        extract_to_json,
        own_extract,
    )

    path = store_path(Path(config.agent.state_dir), emulated=emulated)
    found = extract_history(path, start, end, kinds)
    if user is not None and isinstance(found, HistoryExtract):
        found = own_extract(found, clean_label(user_name(user), MAX_USER))
    return {"store": str(path), "found": extract_to_json(found)}


# ----------------------------------------------------------------------------------------- assembly


Log = Callable[[str], None]


_TOO_LARGE = (
    "A request has at most {body} bytes: send fewer spans in each, or have max_request raised in "
    "[spans]."
)
_LOOKUP_TIME_SHARE = 4
"""Searches for the cgroups of TCP sockets take at most one part in this many of the time."""


class PeerPrincipalLookup:
    """Finds the principals of peers on this host. Implements PeerPrincipals; thread-safe.

    The cgroup of a socket may have to be searched among all of them: each user has a share of the
    time for that, beyond which only the user is known.
    """

    def __init__(
        self,
        clock: Clock,
        resolver: PrincipalResolver,
        connections: TcpConnections | None = None,
    ) -> None:
        from wattspan.ingest.process_lookups import LookupBudget

        self.resolver = resolver
        self._processes = ProcFs()
        self._budget = LookupBudget(clock, _LOOKUP_TIME_SHARE)
        self._lock = threading.Lock()
        self._connections = connections

    def connected(self, pid: int | None, uid: int | None) -> Principal | None:
        """The principal behind a Unix socket; None for a peer of another pid namespace."""
        return self.resolver.of_connection(self._processes, pid, uid)

    def of_process(self, consumer: Consumer) -> Principal | None:
        """The principal of a running process; None if it is gone."""
        found = self.resolver.of_process(self._processes, consumer.pid)
        stat = self._processes.stat(consumer.pid)
        return found if stat is not None and stat.started == consumer.started else None

    def socket_owner(self, end: Endpoint, other: Endpoint) -> Principal | None:
        """The principal of a TCP socket; of the user alone where its cgroup is unknown."""
        from wattspan.processes.inspector import TcpConnections

        with self._lock:
            if self._connections is None:
                self._connections = TcpConnections()
            owner = self._connections.owner_of(end, other)
            if owner is None:
                return None
            user = self.resolver.owner_of(owner.user)
            self._budget.charge(user)
            with self._budget as allowed:
                proven = self.resolver.of_socket(owner.user, owner.cgroup) if allowed else None
        return proven or Principal(user)

    def close(self) -> None:
        """Close the connection to the kernel; the next lookup opens another."""
        with self._lock:
            if self._connections is not None:
                self._connections.close()
                self._connections = None


class SpanAssembly:
    """All parts of spans and queries as one service, not started yet."""

    def __init__(
        self,
        core: AgentCore,
        tuning: TuningAssembly,
        checkpoint: Checkpoint | None,
        *,
        refusals: RejectionCounter,
        principals: PeerPrincipalLookup,
    ) -> None:
        self._core, self._tuning, self._refusals = core, tuning, refusals
        self._principals = principals
        self._run_dir = run_directory(core.config)
        self.services = ServiceGroup("spans")
        self.services.add(lambda: None, principals.close)
        self._forwarder: Forwarder | None = None
        self._joiner: SpanJoiner | None = None
        if core.config.spans.enabled:
            self._forwarder = self._open_forwarder()
            self._joiner = self._add_joiner(checkpoint)
        if core.config.spans.enabled or core.config.agent.api:
            self._add_server()

    def accounts(self) -> SpanAccounts:
        """The newest totals of spans. Safe from any thread."""
        return SpanAccounts() if self._joiner is None else self._joiner.accounts()

    def _add_joiner(self, checkpoint: Checkpoint | None) -> SpanJoiner:
        from wattspan.ingest.identity_verification import IdentityResolver
        from wattspan.processes.host import host_ids
        from wattspan.processes.inspector import ProcessInspector
        from wattspan.service.span_joiner import SpanJoiner

        settings = self._core.config.spans
        sampler = CpuSampler(self._core.clock, settings.resolution)
        self.services.add(sampler.start, sampler.stop)
        inspector = ProcessInspector(principals=self._principals.resolver)
        self.services.add(lambda: None, inspector.close)
        if (forwarder := self._forwarder) is not None:
            self.services.add(forwarder.start, forwarder.stop)
            self.services.health_checks.append(lambda: (forwarder.health(),))
        joiner = SpanJoiner(
            self._core.clock,
            self._core.history,
            IdentityResolver(
                self._core.clock,
                inspector,
                unproven=settings.unproven,
                hosts=host_ids(),
                pools=self._core.pools,
            ),
            settings,
            keep=self._core.config.agent.history,
            side_channel=self._open_side_channel() if settings.unix else None,
            edges=self._core.edges,
            sampler=sampler,
            forwarder=self._forwarder,
            tap=self._tuning.tap,
            static_powers=self._core.static_powers,
            demand=self._core.demand,
            checkpoint=checkpoint,
            pools=self._core.pools,
            share_idle=self._core.config.serving.idle == "proportional",
            log=self._core.log,
        )
        self.services.add_thread("wattspan-joiner", joiner.run, wake=joiner.inbox.notify)
        return joiner

    def _open_forwarder(self) -> Forwarder | None:
        if not self._core.config.spans.forward:
            return None
        from wattspan.otlp.forwarder import Forwarder

        return Forwarder(
            self._core.config.spans,
            self._core.clock,
            self._core.log,
            Path(self._core.config.agent.state_dir) / "forward",
            provenance=lambda: self._core.view().provenance,
            baseline_unknown=self._core.history.baseline_unknown,
            version=__version__,
        )

    def _open_side_channel(self) -> SideChannelServer:
        from wattspan.ingest.side_channel import SideChannelServer

        server = SideChannelServer(
            self._run_dir / "feed.sock", self._principals, pools=self._core.pools
        )

        def start() -> None:
            try:
                server.start()
            except ListenError as error:
                self._continue_without("spans.unix", error)

        self.services.add(start, server.stop)
        return server

    def _add_server(self) -> None:
        core, principals = self._core, self._principals
        agent, spans = core.config.agent, core.config.spans
        limits = ServerLimits(body=spans.max_request, rate=agent.max_rate, body_message=_TOO_LARGE)

        # Not the joiner's sampler: the two release processes independently of each other.
        sampler = CpuSampler(core.clock, spans.resolution, lease=WINDOW_EXPIRY)
        if agent.api:
            self.services.add(sampler.start, sampler.stop)

        opened = ExitStack()  # the server, once it exists

        def start() -> None:
            from wattspan.http.server import HttpServer

            server = HttpServer(
                core.clock, log=core.log, limits=limits, principals=principals, pools=core.pools
            )
            opened.callback(server.stop)
            if self._joiner is not None:
                self._listen_for_spans(server, self._joiner)
            if agent.api:
                self._listen_for_queries(server, sampler)
            server.start()

        # The server creates its sockets in `start`: if a later part fails, they are removed.
        self.services.add(lambda: None, opened.close)
        self.services.add(start, lambda: None)

    def _listen_for_spans(self, server: HttpServer, joiner: SpanJoiner) -> None:
        from wattspan.ingest.export_request import RequestedAttributes
        from wattspan.ingest.listeners import open_receivers
        from wattspan.otlp.destination import check_destination

        tuned = self._core.config.autotune
        asked = RequestedAttributes(work=self._tuning.declared.work_attributes)
        if tuned.mode != "off" and tuned.job:  # else this module would only take memory
            from wattspan.tuning.job_work import instruction_reports, latency_reports

            latencies, instructions = latency_reports(tuned.job), instruction_reports(tuned.job)
            asked = replace(asked, latencies=latencies, instructions=instructions)
        addresses = open_receivers(
            server,
            self._core.config.spans,
            self._run_dir,
            joiner.inbox,
            self._core.clock,
            is_set=lambda key: f"spans.{key}" in self._core.config.origins,
            log=self._core.log,
            asked=asked,
            refusals=self._refusals,
            pools=self._core.pools,
            second=second_listener(self._core.config),
        )
        self.services.addresses.extend(addresses)
        for destination in destinations(self._core.config):
            check_destination(destination, addresses)

    def _listen_for_queries(self, server: HttpServer, sampler: CpuSampler) -> None:
        from wattspan.api.authorization import Authorization
        from wattspan.api.service import QueryService
        from wattspan.http.access_policy import AccessPolicy

        core, emulated = self._core, self._core.emulated is not None
        config, demand = core.config, core.demand

        def recur(request: HttpRequest) -> HttpResponse:
            # Only a request needs these modules, which take memory.
            from wattspan.api.recurring import RecurringHandler
            from wattspan.recurring.run_book import run_book_path

            path = run_book_path(Path(config.agent.state_dir), emulated=emulated)
            owner_of, host = self._principals.of_process, core.view().host
            handler = RecurringHandler(path, core.directory, owner_of, core.clock, host=host)
            return handler.respond(request)

        service = QueryService(
            core.history,
            core.directory,
            core.clock,
            devices=core.devices,
            view=core.view,
            host=core.view().host,
            version=__version__,
            resolution=core.config.agent.api_resolution,
            edges=core.edges.of,
            sampler=sampler,
            tuning=self._tuning.accounts,
            history=self._tuning.history,
            jobs=self._tuning.declared,
            authorization=Authorization.of_host(self._principals.resolver),
            registered=partial(demand.register, Reason.WINDOWS),
            awaits_readings=partial(demand.hold, Reason.QUERY, QUERY_TIME),
            inference=None if self._joiner is None else self._joiner.estimate,
            advice=core.static_powers.facts,
            recurring=recur,
            caps=partial(capper_state, config, core.clock, emulated=emulated),
            stored=partial(stored_energy, config, emulated=emulated),
            pools=core.pools,
        )
        try:
            listening = listen_unix(self._run_dir / "api.sock", what="questions")
            policy = AccessPolicy(self._refusals.counter("api"))
            address = server.add_http(listening, service, policy)
        except ListenError as error:
            self._continue_without("agent.api", error)
        else:
            self.services.addresses.append(address)

    def _continue_without(self, key: str, error: ListenError) -> None:
        if key in self._core.config.origins:
            raise error
        self._core.log(f"The agent continues without this listener: {error}")
