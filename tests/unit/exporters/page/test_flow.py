"""Layout of the live page's flow, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from testbed.snapshots import CPU, GPU, J, account, busy_host, process

from wattspan.model import (
    Consumer,
    HwType,
    Instant,
    Microjoules,
    Nanoseconds,
    ProcessRow,
    Snapshot,
    SpanAccounts,
    SpanRow,
)
from wattspan_exporters.page import flow as drawing
from wattspan_exporters.page import snapshot_delta as stretches
from wattspan_exporters.page.flow import FlowGraph, build_flow
from wattspan_exporters.page.snapshot_delta import delta_between, limit_names

BEGIN = Instant(0, 10**18)
END = Instant(10 * 10**9, 10**18 + 10 * 10**9)


def over(
    *rows: ProcessRow,
    consumers: dict[HwType, int],
    spans: SpanAccounts | None = None,
    before: tuple[ProcessRow, ...] = (),
    retired: int = 0,
) -> FlowGraph:
    """The flow of ten seconds in which this was spent, in joules; ``before`` was spent earlier."""
    domains = tuple(
        account(kind, kind, f"the {kind}", 1.0, (joules, 5, 2))
        for kind, joules in consumers.items()
    )
    then = Snapshot(BEGIN, 1, "host", processes=before)
    if before:
        past = sum(row.energy.get(CPU, 0) for row in before)
        then = replace(then, domains=(account(CPU, CPU, "the cpu", 1.0, (past // J, 0, 0)),))
    now = Snapshot(
        END,
        2,
        "host",
        domains,
        rows,
        retired={CPU: Microjoules(retired * J)},
        spans=spans or SpanAccounts(),
    )
    stretch = delta_between(then, now)
    assert stretch is not None
    return build_flow(limit_names(stretch))


def into(flow: FlowGraph, name: str) -> dict[str, float]:
    """Incoming flow of the node of this name, in joules by the name of the origin."""
    (node,) = (key for key, node in flow.nodes.items() if node.name == name)
    return {
        flow.nodes[link.source].name: link.energy / J for link in flow.links if link.target == node
    }


def named(flow: FlowGraph, layer: str) -> dict[str, float]:
    """Every node of a layer by name, in joules."""
    return {
        node.name: flow.energy[key] / J for key, node in flow.nodes.items() if node.layer == layer
    }


def test_types_stand_between_devices_and_groups() -> None:
    flow = over(
        process(1, "trainer", "pod", {}, {CPU: 3, GPU: 40}),
        process(2, "shell", "", {}, {CPU: 1}),
        consumers={CPU: 6, GPU: 40},
    )
    assert named(flow, "device") == {"the cpu": 13, "the gpu": 47}
    assert into(flow, "CPU") == {"the cpu": 6}
    assert into(flow, "idle") == {"the cpu": 5, "the gpu": 5}
    assert into(flow, "unattributed") == {"the cpu": 2, "the gpu": 2}
    assert into(flow, "pod") == {"CPU": 3, "GPU": 40}
    assert into(flow, "trainer") == {"pod": 43}
    assert into(flow, "shell") == {drawing.NO_GROUP: 1}
    assert into(flow, "unlisted") == {"CPU": 2}


def test_row_that_is_new_counts_from_zero_and_an_old_one_its_difference() -> None:
    flow = over(
        process(1, "old", "", {}, {CPU: 12}),
        process(2, "new", "", {}, {CPU: 4}),
        before=(process(1, "old", "", {}, {CPU: 10}),),
        consumers={CPU: 16},
    )
    assert named(flow, "process") == {"old": 2, "new": 4}


def test_falling_row_counts_from_zero() -> None:
    flow = over(
        process(1, "back", "", {}, {CPU: 3}),
        before=(process(1, "back", "", {}, {CPU: 10}),),
        consumers={CPU: 15},
        retired=11,
    )
    assert named(flow, "process") == {"back": 3}
    assert into(flow, "unlisted") == {"CPU": 2}


def test_energy_of_a_process_that_left_the_list_is_unlisted() -> None:
    flow = over(before=(process(1, "gone", "", {}, {CPU: 10}),), consumers={CPU: 14}, retired=14)
    assert into(flow, "unlisted") == {"CPU": 4}


def test_falling_totals_give_no_interval() -> None:
    host = busy_host()
    earlier = replace(host, at=Instant(host.at.mono - 1, 0))
    less = replace(host.domains[0], energy=Microjoules(1))
    assert delta_between(host, earlier) is None
    assert delta_between(earlier, replace(host, domains=(less, *host.domains[1:]))) is None
    assert delta_between(earlier, replace(host, domains=host.domains[1:])) is None
    assert delta_between(earlier, host) is not None


def test_unbalanced_totals_give_no_interval() -> None:
    host = busy_host()
    earlier = replace(host, at=Instant(host.at.mono - 1, 0))
    extra = process(5, "from nowhere", "", {}, {CPU: 1})
    assert delta_between(earlier, replace(host, processes=(*host.processes, extra))) is None


def test_host_without_domains_is_an_empty_flow() -> None:
    stretch = delta_between(Snapshot(BEGIN, 1, "host"), Snapshot(END, 2, "host"))
    flow = build_flow(stretch)
    assert (flow.nodes, flow.links, flow.total) == ({}, [], 0)
    assert build_flow(None).nodes == {}


def test_unattributed_device_has_no_outgoing_flow() -> None:
    counted = replace(
        account("psys", HwType.ENCLOSURE, "platform", 1.0, (0, 0, 0)), energy=Microjoules(9 * J)
    )
    stretch = delta_between(Snapshot(BEGIN, 1, "host"), Snapshot(END, 2, "host", (counted,)))
    assert into(build_flow(stretch), "counted only") == {"platform": 9}


def test_processes_beyond_the_first_are_the_others_of_their_group() -> None:
    rows = [process(n, f"p{n}", "pod", {}, {CPU: 100 - n}) for n in range(20)]
    whole = sum(100 - n for n in range(20))
    flow = over(*rows, consumers={CPU: whole})
    shown = named(flow, "process")
    assert len(shown) == drawing.MAX_PROCESSES + 1
    assert shown["8 others"] == sum(100 - n for n in range(12, 20))
    assert named(flow, "group") == {"pod": whole}


def test_unlisted_processes_are_summed() -> None:
    many = stretches.MAX_PROCESSES + 10
    rows = [process(n, f"p{n}", "pod", {}, {CPU: 1000 + n}) for n in range(many)]
    whole = sum(1000 + n for n in range(many))
    flow = over(*rows, consumers={CPU: whole})
    assert sum(named(flow, "process").values()) == whole
    assert "others" in named(flow, "process")


def test_small_groups_are_merged() -> None:
    rows = [process(n, f"p{n}", f"pod {n}", {}, {CPU: 1}) for n in range(10)]
    flow = over(process(99, "big", "large", {}, {CPU: 10_000}), *rows, consumers={CPU: 10_010})
    assert named(flow, "group") == {"large": 10_000, "10 other groups": 10}
    assert named(flow, "process") == {"big": 10_000}


def row(service: str, name: str, joules: int, count: int = 1) -> SpanRow:
    return SpanRow(service, name, {CPU: Microjoules(joules * J)}, Nanoseconds(1), count)


def sending(
    *rows: SpanRow, outside: int = 0, senders: dict[str, tuple[int, ...]] | None = None
) -> SpanAccounts:
    sent = senders or {"web": (1,)}
    return SpanAccounts(
        rows=rows,
        outside={("web", "", CPU): Microjoules(outside * J)},
        senders={name: tuple(Consumer(pid, 1) for pid in pids) for name, pids in sent.items()},
    )


def test_process_flow_is_spans_outside_and_open() -> None:
    flow = over(
        process(1, "server", "", {}, {CPU: 20}),
        consumers={CPU: 20},
        spans=sending(row("web", "GET /", 11), row("web", "POST /", 2), outside=4),
    )
    assert named(flow, "span") == {
        "GET /": 11, "POST /": 2, "outside spans": 4, "not in ended spans": 3,
    }  # fmt: skip
    assert into(flow, "GET /") == {"server": 11}


def test_long_span_that_ends_is_drawn_no_wider_than_its_process() -> None:
    flow = over(
        process(1, "server", "", {}, {CPU: 20}),
        consumers={CPU: 20},
        spans=sending(row("web", "long", 90), row("web", "short", 10), outside=4),
    )
    assert named(flow, "span") == {"long": 18, "short": 2}
    (long,) = (node for node in flow.nodes.values() if node.name == "long")
    assert long.detail == (
        "web, 1 ended; with 72 J more, spent before this period or before the process was listed"
    )


def test_scaled_spans_sum_to_their_process_exactly() -> None:
    names = sending(row("web", "a", 37), row("web", "b", 31), row("web", "c", 29), outside=4)
    flow = over(process(1, "server", "", {}, {CPU: 20}), consumers={CPU: 20}, spans=names)
    shown = named(flow, "span")
    assert set(shown) == {"a", "b", "c"}
    assert sum(flow.energy[key] for key, node in flow.nodes.items() if node.layer == "span") == (
        20 * J
    )


def test_processes_of_one_service_are_one() -> None:
    flow = over(
        process(1, "worker", "pod a", {}, {CPU: 5}),
        process(2, "worker", "pod b", {}, {CPU: 7}),
        process(3, "other", "pod a", {}, {CPU: 1}),
        consumers={CPU: 13},
        spans=sending(row("web", "GET /", 10), senders={"web": (1, 2)}),
    )
    assert named(flow, "process") == {"web": 12, "other": 1}
    assert into(flow, "web") == {"pod a": 5, "pod b": 7}
    (web,) = (node for node in flow.nodes.values() if node.name == "web")
    assert web.detail == "2 processes: pid 1, 2"


def test_services_that_share_a_process_are_one() -> None:
    flow = over(
        process(1, "a", "", {}, {CPU: 5}),
        process(2, "b", "", {}, {CPU: 7}),
        consumers={CPU: 12},
        spans=sending(
            row("web", "GET /", 3), row("db", "SELECT", 4), senders={"web": (1, 2), "db": (2,)}
        ),
    )
    assert named(flow, "process") == {"db, web": 12}
    assert named(flow, "span") == {"GET /": 3, "SELECT": 4, "not in ended spans": 5}


def test_further_span_names_are_one() -> None:
    rows = [row("web", f"GET /{n}", 10 + n) for n in range(drawing.MAX_SPANS + 3)]
    flow = over(
        process(1, "server", "", {}, {CPU: 200}), consumers={CPU: 200}, spans=sending(*rows)
    )
    assert named(flow, "span")["other spans"] == 10 + 11 + 12


def test_process_without_spans_is_a_leaf() -> None:
    flow = over(process(1, "server", "", {}, {CPU: 20}), consumers={CPU: 20}, spans=sending())
    assert named(flow, "span") == {}


@pytest.mark.parametrize("name", ["\x1b[31mred", "\ud800", "x" * 5000, "<script>", ""])
def test_names_from_outside_are_bounded_and_printable(name: str) -> None:
    flow = over(
        process(1, name, name, {}, {CPU: 20}),
        consumers={CPU: 20},
        spans=sending(row("web", name, 10)),
    )
    for node in flow.nodes.values():
        for text in (node.id, node.name, node.detail):
            assert len(text) < 400
            text.encode()
            assert "\x1b" not in text
