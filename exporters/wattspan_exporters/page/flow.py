"""The flow graph of a period: devices, hardware types, groups, processes, spans.

Pure and exact, in whole microjoules: the energy that flows into a node is the node's energy, and no
more flows out. Processes are charged by hardware type, so the share of each device in a group is
unknown; the types stand between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from wattspan.model import Consumer, Group, HwType, Payer, Provenance
from wattspan_exporters.catalogue.definition import sanitize
from wattspan_exporters.page.snapshot_delta import (
    HARDWARE_TYPES,
    DeviceDelta,
    EnergyByType,
    SnapshotDelta,
    SpanDelta,
    add_energy,
    merge_into,
    most_specific_group,
    total_energy,
)

MAX_PROCESSES = 12
"""Named process nodes, those with the highest energy."""

MAX_GROUPS = 8
"""Group nodes without a named process."""

MIN_SHARE_DIVISOR = 500
"""Minimum energy of a named node, as a divisor of the energy of all processes."""

MAX_SPANS = 6
"""Span nodes of one process."""

TYPE_NAMES = {
    HwType.CPU: "CPU",
    HwType.GPU: "GPU",
    HwType.MEMORY: "memory",
    HwType.ENCLOSURE: "enclosure",
}

NO_GROUP = "no group"


class FlowNode(NamedTuple):
    """A node of the graph."""

    id: str
    layer: str
    name: str
    detail: str = ""
    type: HwType | None = None
    provenance: Provenance | None = None


class FlowLink(NamedTuple):
    source: str
    target: str
    energy: int
    watts: float | None


Rates = Sequence[float | None]
"""Watts per microjoule of each hardware type, in the order of ``HARDWARE_TYPES``."""


@dataclass(slots=True)
class FlowGraph:
    """A flow graph. The energy of a node is its inflow; a device has its own.

    Energy is exact. Watts are None if the time of a part of the energy is unknown.
    """

    duration: int = 0
    nodes: dict[str, FlowNode] = field(default_factory=dict)
    energy: dict[str, int] = field(default_factory=dict)
    watts: dict[str, float | None] = field(default_factory=dict)
    links: list[FlowLink] = field(default_factory=list)
    total: int = 0  # energy of all devices
    power: float | None = None  # of all devices, without absent ones that have no energy
    least_power: float | None = None  # of the devices whose power is known; None if none is
    bounded: bool = False  # the energy of a part of the time of a device is unknown

    def add_source(self, node: FlowNode, energy: int, watts: float | None) -> None:
        """Add a node without inflow."""
        self.nodes[node.id], self.energy[node.id], self.watts[node.id] = node, energy, watts

    def add_link(self, source: str, node: FlowNode, energy: int, watts: float | None) -> None:
        """Add a flow of ``energy`` from ``source`` to ``node``; zero is omitted."""
        if energy <= 0:
            return
        self.nodes.setdefault(node.id, node)
        self.energy[node.id] = self.energy.get(node.id, 0) + energy
        self.watts[node.id] = _sum((self.watts.get(node.id, 0.0), watts))
        self.links.append(FlowLink(source, node.id, energy, watts))

    def rate(self, node: str) -> float | None:
        """Watts per microjoule of a node; None if unknown."""
        watts, energy = self.watts[node], self.energy[node]
        return None if watts is None else watts / energy if energy else 0.0


def _sum(watts: Iterable[float | None]) -> float | None:
    """The sum, None if a part is unknown."""
    whole = 0.0
    for part in watts:
        if part is None:
            return None
        whole += part
    return whole


def _watts(energy: int, rate: float | None) -> float | None:
    if energy == 0:
        return 0.0
    return None if rate is None else energy * rate


def _watts_of(parts: EnergyByType, rates: Rates) -> float | None:
    return _sum(map(_watts, parts, rates))


IDLE = FlowNode("r:idle", "rest", "idle", "baseline of the devices")
UNATTRIBUTED = FlowNode(
    "r:unattributed", "rest", "unattributed", "active energy without a known consumer"
)
UNDIVIDED = FlowNode("r:undivided", "rest", "counted only", "devices whose usage is not measured")
UNLISTED = FlowNode(
    "u:unlisted", "group", "unlisted", "processes without a row of their own, and ended ones"
)


def build_flow(
    delta: SnapshotDelta | None,
    power: Callable[[DeviceDelta], float | None] = attrgetter("known_power"),
) -> FlowGraph:
    """The flow of a period; an empty graph for None. ``power`` gives the watts of a device.

    A device's watts are divided in proportion to its energy. Watts per microjoule of a type are
    the mean of its devices, those of a process the mean of its types: the shares of the devices
    in the energy of a process are unknown.
    """
    if delta is None:
        return FlowGraph()
    flow = FlowGraph(delta.duration)
    for spent in delta.devices.values():
        domain = spent.domain
        device = FlowNode(
            f"d:{sanitize(domain.id)}",
            "device",
            sanitize(domain.name),
            domain.provenance,
            domain.hw_type,
            domain.provenance,
        )
        flow.add_source(device, spent.energy, power(spent))
        rate = flow.rate(device.id)
        for node, energy in (
            (_type_node(domain.hw_type), spent.consumers),
            (IDLE, spent.idle),
            (UNATTRIBUTED, spent.unattributed),
            (UNDIVIDED, spent.undivided),
        ):
            flow.add_link(device.id, node, energy, _watts(energy, rate))
    counted = [one for one in delta.devices.values() if one.present or one.energy]
    flow.total = sum(one.energy for one in counted)
    flow.power = _sum(map(power, counted)) if counted else None
    known = [watts for one in counted if (watts := power(one)) is not None]
    flow.least_power = sum(known) if known else None
    flow.bounded = any(one.known < one.lasted or one.unmeasured for one in counted)
    rates = [
        flow.rate(f"t:{kind}") if f"t:{kind}" in flow.nodes else None for kind in HARDWARE_TYPES
    ]
    _add_groups(flow, delta, rates)
    return flow


def _type_node(kind: HwType) -> FlowNode:
    return FlowNode(f"t:{kind}", "type", TYPE_NAMES[kind], "energy of processes", kind)


# ------------------------------------------------------------------------ groups and processes


@dataclass(slots=True)
class _ProcessNode:
    """A node for a process, or for all processes that send the spans of one service."""

    payers: list[Payer]
    services: frozenset[str] = frozenset()
    groups: dict[Group | None, EnergyByType] = field(default_factory=dict)

    @property
    def energy(self) -> int:
        return sum(map(sum, self.groups.values()))


def _add_groups(flow: FlowGraph, delta: SnapshotDelta, rates: Rates) -> None:
    nodes = sorted(_process_nodes(delta), key=lambda node: (-node.energy, str(node.payers[0])))
    least = sum(delta.consumers) // MIN_SHARE_DIVISOR
    named = [node for node in nodes[:MAX_PROCESSES] if node.energy >= least]
    others = dict(delta.unlisted_by_group)
    counts: Counter[Group | None] = Counter()
    for node in nodes[len(named) :]:
        merge_into(others, node.groups, add_energy)
        counts.update(dict.fromkeys(node.groups, len(node.payers)))
    sums = dict(others)
    for node in named:
        merge_into(sums, node.groups, add_energy)

    def rank(group: Group | None) -> tuple[int, str]:
        return -sum(sums[group]), str(group)

    needed = {group for node in named for group in node.groups}
    free = sorted(sums.keys() - needed, key=rank)
    large = [group for group in free[:MAX_GROUPS] if sum(sums[group]) >= least]
    shown = sorted(needed.union(large), key=rank)
    for group in shown:
        _from_types(flow, _group_node(group), sums[group], rates)
    if hidden := free[len(large) :]:
        name = f"{len(hidden)} other group{'s' if len(hidden) > 1 else ''}"
        rest = FlowNode("g:others", "group", name, "groups with less energy")
        _from_types(flow, rest, total_energy(sums[group] for group in hidden), rates)
    _from_types(flow, UNLISTED, delta.unlisted, rates)
    for node in named:
        shown_as = _process_flow_node(node, delta)
        for group, parts in node.groups.items():
            flow.add_link(_group_node(group).id, shown_as, sum(parts), _watts_of(parts, rates))
        if node.services and shown_as.id in flow.nodes:
            _add_spans(flow, shown_as, node.services, delta)
    for group in shown:
        if group in others:
            group_id, many = _group_node(group).id, counts[group]
            name = f"{many} other{'s' if many > 1 else ''}"
            if group in delta.unlisted_by_group:  # their number is unknown
                name = "others"
            detail = "processes of the same group with less energy"
            rest = FlowNode(f"o:{group_id}", "process", name, detail)
            flow.add_link(group_id, rest, sum(others[group]), _watts_of(others[group], rates))


def _from_types(flow: FlowGraph, node: FlowNode, parts: EnergyByType, rates: Rates) -> None:
    for kind, energy, rate in zip(HARDWARE_TYPES, parts, rates, strict=True):
        flow.add_link(f"t:{kind}", node, energy, _watts(energy, rate))


def _group_node(group: Group | None) -> FlowNode:
    if group is None:
        return FlowNode("g:-", "group", NO_GROUP, "processes without container, job, unit or user")
    return FlowNode(
        f"g:{group.kind}:{sanitize(group.name)}", "group", sanitize(group.name), group.kind
    )


def _process_nodes(delta: SnapshotDelta) -> list[_ProcessNode]:
    """One node for each process, and one for all processes that send spans of one service.

    The process of a single span is not kept, so the processes of a service share one node.
    """
    together: dict[Payer, _ProcessNode] = {}
    for service, senders in sorted(delta.senders.items()):
        here: list[Payer] = sorted(payer for payer in senders if payer in delta.processes)
        joined = [together[payer] for payer in here if payer in together]
        payers = {payer: None for node in joined for payer in node.payers}
        services = frozenset({service}).union(*(node.services for node in joined))
        node = _ProcessNode([*(payers | dict.fromkeys(here))], services)
        together.update(dict.fromkeys(node.payers, node))
    nodes: dict[int, _ProcessNode] = {}
    for payer, (info, parts) in delta.processes.items():
        node = together.get(payer) or _ProcessNode([payer])
        nodes[id(node)] = node
        merge_into(node.groups, {most_specific_group(info): parts}, add_energy)
    return list(nodes.values())


def _process_flow_node(node: _ProcessNode, delta: SnapshotDelta) -> FlowNode:
    payer, *more = node.payers
    if more:
        name = ", ".join(map(sanitize, sorted(node.services)))
        pids = ", ".join(str(one.pid) for one in node.payers[:8] if isinstance(one, Consumer))
        detail = f"{len(node.payers)} processes: pid {pids}{', …' if len(more) > 7 else ''}"
        return FlowNode(f"s:{name}", "process", name, detail)
    info = delta.processes[payer].info
    if isinstance(payer, Consumer):
        key, detail = f"{payer.pid}.{payer.started}", f"pid {payer.pid}"
    else:
        key, detail = sanitize(payer.cgroup), "short-lived processes"
    if node.services:
        detail += f", service {', '.join(map(sanitize, sorted(node.services)))}"
    return FlowNode(f"p:{key}", "process", sanitize(info.command), detail)


# --------------------------------------------------------------------------------------- spans


def _add_spans(
    flow: FlowGraph, process: FlowNode, services: Iterable[str], delta: SnapshotDelta
) -> None:
    """Add the ended spans of a process, with no more energy than the process has.

    A span is booked at its end with all its energy, and a process has a row only while it is
    listed. Therefore spans can have more energy than their process; then they are scaled down.
    """
    room = flow.energy[process.id]
    ended: dict[tuple[str, str | None], SpanDelta] = {
        name: called for name, called in delta.spans.items() if name[0] in services
    }
    if not ended and not any(delta.outside.get(service) for service in services):
        return
    energies = {name: sum(called.parts) for name, called in ended.items()}
    drawn = _scale_to_fit(energies, room)
    rate = flow.rate(process.id)

    def link(node: FlowNode, energy: int) -> None:
        flow.add_link(process.id, node, energy, _watts(energy, rate))

    ranked = sorted(
        (name for name in drawn if name[1] is not None),
        key=lambda name: (-drawn[name], name),
    )
    for name in ranked[:MAX_SPANS]:
        link(_span_node(name, ended[name], energies[name] - drawn[name]), drawn[name])
    further = [name for name in drawn if name not in ranked[:MAX_SPANS]]
    link(
        FlowNode(f"x:others:{process.id}", "span", "other spans", "of further names"),
        sum(drawn[name] for name in further),
    )
    left = room - sum(drawn.values())
    between = min(left, sum(delta.outside.get(service, 0) for service in services))
    link(
        FlowNode(
            f"x:outside:{process.id}",
            "span",
            "outside spans",
            "energy of the process without an open span",
        ),
        between,
    )
    link(
        FlowNode(
            f"x:open:{process.id}",
            "span",
            "not in ended spans",
            "energy of open spans, or not divided among spans yet",
        ),
        left - between,
    )


def _scale_to_fit(
    energies: Mapping[tuple[str, str | None], int], room: int
) -> dict[tuple[str, str | None], int]:
    """The energies, reduced by a common ratio to ``room`` if they exceed it."""
    whole = sum(energies.values())
    if whole <= room:
        return dict(energies)
    fitting = {name: energy * room // whole for name, energy in energies.items()}
    largest = max(fitting, key=lambda name: fitting[name])
    fitting[largest] += room - sum(fitting.values())
    return fitting


_EARLIER = "before this period or before the process was listed"


def _span_node(name: tuple[str, str | None], called: SpanDelta, before: int) -> FlowNode:
    service, span = sanitize(name[0]), sanitize(name[1] or "")
    ended = f"{called.calls} ended" if called.calls else "none ended"
    more = f"; with {before / 1e6:.3g} J more, spent {_EARLIER}" if before else ""
    return FlowNode(f"x:{service}:{span}", "span", span, f"{service}, {ended}{more}")
