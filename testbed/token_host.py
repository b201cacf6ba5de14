"""A host in virtual time whose processes send recorded spans: requests, tokens and energy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from testbed.otlp import attribute
from testbed.otlp_reference import json_of
from wattspan.config import SpansSettings
from wattspan.http.sockets import Peer
from wattspan.ingest.export_request import ExportRequest, RequestedAttributes, ResourceClaim
from wattspan.ingest.identity_verification import SpanIdentity
from wattspan.ingest.process_lookups import Sender
from wattspan.ingest.trace_decoder import TraceDecoder
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Domain,
    Group,
    GroupKind,
    HwType,
    Interval,
    Microjoules,
    PayerInfo,
    Principal,
    Provenance,
    Share,
    SpanAccounts,
    Tick,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.span_joiner import SpanJoiner
from wattspan.spans.values import Outcome
from wattspan.testing import ManualClock

TICK = 100 * MILLISECOND
WATTS = 100  # of each GPU's user
CPU_SHARE = 1000  # microjoules of each process in a tick
KINDS = ("UNSPECIFIED", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")


class TokenHost:
    """Each process of ``processes`` has a ``name`` and may have ``parent`` (a name), ``command``,
    ``user``, ``unit``, ``container`` and ``gpu``: the name of the GPU that it uses all the time.
    """

    def __init__(
        self,
        processes: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any] | None = None,
        known: Mapping[str, Consumer] = MappingProxyType({}),
    ) -> None:
        """``known`` are processes of this machine, by name."""
        self.settings = SpansSettings(**(settings or {}))
        self.processes = {each["name"]: each for each in processes}
        self.consumers = {
            name: known.get(name, Consumer(1000 + at, 1000 + at))
            for at, name in enumerate(self.processes)
        }
        self.pids = {name: one.pid for name, one in self.consumers.items()}
        self.gpus = sorted({each["gpu"] for each in processes if "gpu" in each})
        self.clock = ManualClock()
        self.history = EnergyHistory(600 * SECOND, 10**8)
        domains = [
            Domain("cpu", HwType.CPU, "package-0", "fake", Provenance.EMULATED, resource="cpu"),
            *(
                Domain(gpu, HwType.GPU, gpu, "fake", Provenance.EMULATED, resource=gpu)
                for gpu in self.gpus
            ),
        ]
        births = [self._info(name) for name in self.processes]
        tick = Tick(self.clock.now(), domains={"fake": domains}, births=births)
        self.history.apply(tick, ())
        self.doubt = Microjoules(0)  # of each share of a GPU; 0 for an unknown one
        self.spent = 0  # microjoules of all GPUs
        self.counts_cpu, self.cpu_ticks, self._ticks = True, 1, 0  # ticks of a step of the CPU
        self.joiner = SpanJoiner(self.clock, self.history, self, self.settings, keep=60 * SECOND)

    def _info(self, name: str) -> PayerInfo:
        each = self.processes[name]
        kinds = (GroupKind.CONTAINER, GroupKind.UNIT)
        groups = tuple(Group(kind, each[kind.value]) for kind in kinds if kind.value in each)
        parent = self.pids[each["parent"]] if "parent" in each else 1
        principal = Principal(each.get("user", 1000), each.get("container", ""))
        command = each.get("command", "python")
        return PayerInfo(self.consumers[name], command, groups, "", parent, principal)

    # ------------------------------------------------------- the identities of senders

    def resolve(self, peer: Peer, claims: Iterable[ResourceClaim]) -> tuple[SpanIdentity, ...]:
        return tuple(map(self._believed, claims))

    def _believed(self, claim: ResourceClaim) -> SpanIdentity:
        found = next((one for one in self.consumers.values() if one.pid == claim.pid), None)
        assert found is not None
        principal = self.principal(found)
        return SpanIdentity(found, principal, Sender(found.pid, principal))

    def principal(self, consumer: Consumer) -> Principal | None:
        name = next(name for name, one in self.consumers.items() if one == consumer)
        return self._info(name).principal

    def announcer(self, pid: int, proven: Principal) -> Consumer | None:
        return None

    def may_announce(self, sender: Sender, announcer: Consumer) -> bool:
        return False

    # ------------------------------------------------------------------------- the time

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds * SECOND / TICK)):
            before = self.clock.now()
            self.clock.advance(ns=TICK)
            now, none, settled = self.clock.now(), Microjoules(0), []
            self._ticks += 1
            if self.counts_cpu and self._ticks % self.cpu_ticks == 0:
                length, part = self.cpu_ticks * TICK, Microjoules(CPU_SHARE * self.cpu_ticks)
                everyone = tuple(Share(one, part) for one in self.consumers.values())
                begin = now._replace(mono=now.mono - length, wall=now.wall - length)
                interval = Interval("cpu", begin, now, Microjoules(part * len(everyone)))
                settled.append(Attribution(interval, everyone, none, none))
            for gpu in self.gpus:
                users = [
                    self.consumers[name]
                    for name, each in self.processes.items()
                    if each.get("gpu") == gpu
                ]
                part = Microjoules(WATTS * TICK // 1000 // len(users))
                shares = tuple(Share(one, part) for one in users)
                energy = Microjoules(part * len(users))
                self.spent += energy
                interval = Interval(gpu, before, now, energy)
                doubts = (self.doubt,) * len(shares) if self.doubt else ()
                settled.append(Attribution(interval, shares, none, none, doubts=doubts))
            self.history.apply(Tick(now), settled)
            self.joiner.turn()

    def send(
        self,
        spans: Sequence[Mapping[str, Any]],
        resources: Mapping[str, Mapping[str, Any]],
        *,
        json: bool,
        end: float,
    ) -> None:
        """Send spans of one process, whose times are seconds and whose recording ends at ``end``
        now, with the attributes of its resource.
        """
        (name,) = {each.get("process", "app") for each in spans}
        whole = ExportTraceServiceRequest()
        outer = whole.resource_spans.add()
        resource = {"service.name": name, "process.pid": self.pids[name], **resources.get(name, {})}
        for key, value in resource.items():
            attribute(outer.resource, key, value)
        zero = self.clock.now().wall - round(end * SECOND)
        for each in spans:
            scope = outer.scope_spans.add()
            scope.scope.name = each.get("scope", "")
            made = scope.spans.add(
                trace_id=each["trace"].to_bytes(16),
                span_id=each["id"].to_bytes(8),
                parent_span_id=each["parent"].to_bytes(8) if "parent" in each else b"",
                name=each["name"],
                kind=KINDS.index(each.get("kind", "INTERNAL")),
                start_time_unix_nano=zero + round(each["start"] * SECOND),
                end_time_unix_nano=zero + round(each["end"] * SECOND),
            )
            for number in range(each.get("messages", 0)):  # as OpenInference writes them, in front
                attribute(made, f"llm.input_messages.{number}.message.role", "user")
                attribute(made, f"llm.input_messages.{number}.message.content", f"part {number}")
            for key, value in each.get("attributes", {}).items():
                attribute(made, key, value)
        asked = RequestedAttributes(presets=self.settings.presets, names=self.settings.attributes)
        decoder = TraceDecoder(asked, max_spans=1000, max_fields=1 << 20)
        body = json_of(whole) if json else whole.SerializeToString()
        parts = tuple(decoder.decode(body, json=json).parts)
        self.joiner.inbox.accept(ExportRequest(Peer(), self.clock.monotonic(), len(body), parts))

    def accounts(self) -> SpanAccounts:
        """All totals, once nothing waits."""
        self.joiner.finish()
        found = self.joiner.accounts()
        assert not found.inference_waiting
        outcomes = {name: count for name, count in found.outcomes.items() if count}
        assert outcomes.keys() <= {Outcome.JOINED, Outcome.PARTIAL}
        return found
