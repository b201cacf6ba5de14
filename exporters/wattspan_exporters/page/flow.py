"""The flow graph of a period: devices, hardware types, groups, processes, spans.

Pure and exact, in whole microjoules: the energy that flows into a node is the node's energy, and no
more flows out. Processes are charged by hardware type, so the share of each device in a group is
unknown; the types stand between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from wattspan.model import Consumer, Group, HwType, Payer, Provenance
from wattspan_exporters.catalogue.definition import sanitize
from wattspan_exporters.page.snapshot_delta import (
    HARDWARE_TYPES,
    ZERO_ENERGY,
    DeviceDelta,
    EnergyByType,
    SnapshotDelta,
    SpanDelta,
    add_energy,
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

    Its energy is exact. Its watts are None where some of what flows in is of a time that is not
    known: a sum that silently lacks a part is a wrong sum.
    """

    duration: int = 0
    nodes: dict[str, FlowNode] = field(default_factory=dict)
    energy: dict[str, int] = field(default_factory=dict)
    watts: dict[str, float | None] = field(default_factory=dict)
    links: list[FlowLink] = field(default_factory=list)
    total: int = 0  # energy of all devices
    power: float | None = None  # their power, without devices that are gone and have no energy

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


IDLE = FlowNode("r:idle", "rest", "idle", "drawn for doing nothing")
UNATTRIBUTED = FlowNode(
    "r:unattributed", "rest", "unattributed", "spent by nobody that can be named"
)
UNDIVIDED = FlowNode(
    "r:undivided", "rest", "counted only", "no counter says who uses these devices"
)
UNLISTED = FlowNode(
    "u:unlisted", "group", "unlisted", "processes that spend little, or that ended long ago"
)


def build_flow(
    stretch: SnapshotDelta | None,
    power: Callable[[DeviceDelta], float | None] = attrgetter("known_power"),
) -> FlowGraph:
    """The flow of a period; an empty graph for None. ``power`` gives the watts of a device.

    A device's watts are divided as its energy is. A type's microjoules stand for the mean of what
    its devices' do, and a process's for the mean of its types': what it took of which device is
    not known, nor of which type a span's energy is where spans are drawn smaller.
    """
    if stretch is None:
        return FlowGraph()
    flow = FlowGraph(stretch.duration)
    for spent in stretch.devices.values():
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
    counted = [one for one in stretch.devices.values() if one.present or one.energy]
    flow.total = sum(one.energy for one in counted)
    flow.power = _sum(map(power, counted)) if counted else None
    rates = [
        flow.rate(f"t:{kind}") if f"t:{kind}" in flow.nodes else None for kind in HARDWARE_TYPES
    ]
    _add_groups(flow, stretch, rates)
    return flow


def _type_node(kind: HwType) -> FlowNode:
    return FlowNode(f"t:{kind}", "type", TYPE_NAMES[kind], "what processes spent", kind)


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


def _add_groups(flow: FlowGraph, stretch: SnapshotDelta, rates: Rates) -> None:
    actors = sorted(
        _process_nodes(stretch), key=lambda actor: (-actor.energy, str(actor.payers[0]))
    )
    least = sum(stretch.consumers) // MIN_SHARE_DIVISOR
    named = [actor for actor in actors[:MAX_PROCESSES] if actor.energy >= least]
    rest = actors[len(named) :]
    others: dict[Group | None, EnergyByType] = {}
    counts: dict[Group | None, int] = {}
    for actor in rest:
        for group, parts in actor.groups.items():
            others[group] = add_energy(others.get(group, ZERO_ENERGY), parts)
            counts[group] = counts.get(group, 0) + len(actor.payers)
    for group, parts in stretch.unlisted_by_group.items():
        others[group] = add_energy(others.get(group, ZERO_ENERGY), parts)
    sums: dict[Group | None, EnergyByType] = dict(others)
    for actor in named:
        for group, parts in actor.groups.items():
            sums[group] = add_energy(sums.get(group, ZERO_ENERGY), parts)
    needed = {group for actor in named for group in actor.groups}
    free = sorted(
        (group for group in sums if group not in needed),
        key=lambda group: (-sum(sums[group]), str(group)),
    )
    large = [group for group in free[:MAX_GROUPS] if sum(sums[group]) >= least]
    shown = needed.union(large)
    for group in sorted(shown, key=lambda group: (-sum(sums[group]), str(group))):
        _from_types(flow, _group_node(group), sums[group], rates)
    hidden = free[len(large) :]
    if hidden:
        name = f"{len(hidden)} other group{'s' if len(hidden) > 1 else ''}"
        node = FlowNode("g:others", "group", name, "those that spent least")
        _from_types(flow, node, total_energy(sums[group] for group in hidden), rates)
    _from_types(flow, UNLISTED, stretch.unlisted, rates)
    for actor in named:
        node = _process_flow_node(actor, stretch)
        for group, parts in actor.groups.items():
            flow.add_link(_group_node(group).id, node, sum(parts), _watts_of(parts, rates))
        if actor.services and node.id in flow.nodes:
            _add_spans(flow, node, actor.services, stretch)
    for group in shown:
        if group in others:
            group_id = _group_node(group).id
            many = counts.get(group, 0)
            name = f"{many} other{'s' if many > 1 else ''}"
            if group in stretch.unlisted_by_group:  # their number is unknown
                name = "others"
            detail = "processes of the same group that spent less"
            node = FlowNode(f"o:{group_id}", "process", name, detail)
            flow.add_link(group_id, node, sum(others[group]), _watts_of(others[group], rates))


def _from_types(flow: FlowGraph, node: FlowNode, parts: EnergyByType, rates: Rates) -> None:
    for kind, energy, rate in zip(HARDWARE_TYPES, parts, rates, strict=True):
        flow.add_link(f"t:{kind}", node, energy, _watts(energy, rate))


def _group_node(group: Group | None) -> FlowNode:
    if group is None:
        return FlowNode("g:-", "group", NO_GROUP, "processes of no container, job, unit or user")
    return FlowNode(
        f"g:{group.kind}:{sanitize(group.name)}", "group", sanitize(group.name), group.kind
    )


def _process_nodes(stretch: SnapshotDelta) -> list[_ProcessNode]:
    """One node for each process, and one for all processes that send spans of one service.

    Which of several processes a service's span ran in is not kept, so only together can they be
    drawn as what the spans are part of.
    """
    together: dict[Payer, _ProcessNode] = {}
    for service, senders in sorted(stretch.senders.items()):
        here: list[Payer] = sorted(payer for payer in senders if payer in stretch.processes)
        joined = [together[payer] for payer in here if payer in together]
        payers = {payer: None for actor in joined for payer in actor.payers}
        services = frozenset({service}).union(*(actor.services for actor in joined))
        actor = _ProcessNode([*(payers | dict.fromkeys(here))], services)
        together.update(dict.fromkeys(actor.payers, actor))
    actors: dict[int, _ProcessNode] = {}
    for payer, (info, parts) in stretch.processes.items():
        actor = together.get(payer) or _ProcessNode([payer])
        actors[id(actor)] = actor
        group = most_specific_group(info)
        actor.groups[group] = add_energy(actor.groups.get(group, ZERO_ENERGY), parts)
    return list(actors.values())


def _process_flow_node(actor: _ProcessNode, stretch: SnapshotDelta) -> FlowNode:
    payer, *more = actor.payers
    if more:
        name = ", ".join(map(sanitize, sorted(actor.services)))
        pids = ", ".join(str(one.pid) for one in actor.payers[:8] if isinstance(one, Consumer))
        detail = f"{len(actor.payers)} processes: pid {pids}{', …' if len(more) > 7 else ''}"
        return FlowNode(f"s:{name}", "process", name, detail)
    info = stretch.processes[payer].info
    if isinstance(payer, Consumer):
        key, detail = f"{payer.pid}.{payer.started}", f"pid {payer.pid}"
    else:
        key, detail = sanitize(payer.cgroup), "short-lived processes"
    if actor.services:
        detail += f", service {', '.join(map(sanitize, sorted(actor.services)))}"
    return FlowNode(f"p:{key}", "process", sanitize(info.command), detail)


# --------------------------------------------------------------------------------------- spans


def _add_spans(
    flow: FlowGraph, process: FlowNode, services: Iterable[str], stretch: SnapshotDelta
) -> None:
    """Add the ended spans of a process, with no more energy than the process has.

    A span is booked when it has ended, at once and with all that it spent, and a process has a
    row of its own only once it is listed, so spans may have more than their process: then they are
    drawn smaller, and say so.
    """
    room = flow.energy[process.id]
    ended: dict[tuple[str, str | None], SpanDelta] = {
        name: called for name, called in stretch.spans.items() if name[0] in services
    }
    if not ended and not any(stretch.outside.get(service) for service in services):
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
    between = min(left, sum(stretch.outside.get(service, 0) for service in services))
    link(
        FlowNode(
            f"x:outside:{process.id}",
            "span",
            "outside spans",
            "while none of its spans was open",
        ),
        between,
    )
    link(
        FlowNode(
            f"x:open:{process.id}",
            "span",
            "not in ended spans",
            "in spans that are still open, or not divided among spans yet",
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


_EARLIER = "before this stretch or before the process was listed"


def _span_node(name: tuple[str, str | None], called: SpanDelta, before: int) -> FlowNode:
    service, span = sanitize(name[0]), sanitize(name[1] or "")
    ended = f"{called.calls} ended" if called.calls else "none ended"
    more = f"; with {before / 1e6:.3g} J more, spent {_EARLIER}" if before else ""
    return FlowNode(f"x:{service}:{span}", "span", span, f"{service}, {ended}{more}")
