import io
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console
from testbed.snapshots import NOON, busy_host, serving_host
from testbed.top_view import document, drawn, line_with

from wattspan.api.snapshot_document import SnapshotDocument, restrict
from wattspan.cli.top.controls import SortKey, ViewOptions, ViewSection
from wattspan.cli.top.tables import device_tree, select_rows
from wattspan.cli.top.view import BANNER, render_snapshot
from wattspan.model import (
    Certainty,
    Footprint,
    GapReason,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Provenance,
    RatedEnergy,
    RateOrigin,
    Snapshot,
)


def selected(**chosen: object) -> SnapshotDocument:
    return select_rows(document(busy_host()), ViewOptions(**chosen))  # type: ignore[arg-type]


def test_view_shows_devices_groups_and_processes_with_watts_and_joules() -> None:
    lines = drawn(busy_host())
    assert line_with("package-0 ", [x for x in lines if "core" not in x]).split() == [
        "cpu", "package-0", "84.2", "12.4", "kJ", "76%", "24%", "0.2%", "measured",
    ]  # fmt: skip
    assert line_with("tritonserver", lines).split() == [
        "4180", "tritonserver", "serving", "22.4", "22.4", "2.10", "kJ",
    ]  # fmt: skip
    assert line_with(" unit ", lines).split()[-3:] == ["0.3", "61.0", "J"]


def test_first_line_shows_the_host_totals() -> None:
    first = drawn(busy_host())[0]
    assert first.split() == [
        "wattspan", "node7", "22:17:32Z", "818.5", "W", "≥", "120", "kJ", "in", "4m", "12s",
    ]  # fmt: skip


def test_first_line_has_energy_and_time_of_one_period_after_a_restart() -> None:
    snapshot = busy_host()
    day = 24 * 3600 * 10**9
    resumed = replace(snapshot, since=Instant(0, snapshot.at.wall - day - 5 * 3600 * 10**9))
    assert drawn(resumed)[0].endswith("120 kJ in 1d 05h")


def test_first_line_ends_with_the_cost() -> None:
    def last(footprint: Footprint, *, gaps: bool = False) -> str:
        domains = busy_host().domains
        if not gaps:
            domains = tuple(replace(account, gaps={}) for account in domains)
        host = replace(busy_host(), domains=domains, footprint=footprint)
        return drawn(host)[0].partition("12s  ")[2]

    cost = RatedEnergy("EUR", RateOrigin.CONSTANT, 300_000_000, 10_012_345)
    carbon = RatedEnergy("g", RateOrigin.CONSTANT, None, 12_300 * 10**9)
    assert last(Footprint(cost, carbon)) == "0.0100 EUR"
    assert last(Footprint(carbon=carbon)) == "12.30 kg CO2e"
    partly = replace(cost, unknown=Microjoules(5))
    assert last(Footprint(partly)) == "≥ 0.0100 EUR"
    assert last(Footprint(replace(partly, total=0))) == "- EUR"
    assert last(Footprint(cost, carbon), gaps=True) == "≥ 0.0100 EUR", "energy is missing"
    nothing = Footprint(RatedEnergy("EUR", RateOrigin.CONSTANT, 300_000_000, 0))
    bare = replace(busy_host(), domains=(), footprint=nothing)
    assert drawn(bare)[0].endswith("- EUR"), "the energy is unknown"


def test_json_has_cost_and_carbon() -> None:
    cost = RatedEnergy("EUR", RateOrigin.METRIC, None, 2_500_000_000, Microjoules(3_000_000))
    told = msgspec.to_builtins(document(replace(busy_host(), footprint=Footprint(cost))))
    assert told["cost"] == {
        "unit": "EUR", "origin": "metric", "per_kilowatt_hour": None, "per_hour": None,
        "total": 2.5, "unknown_joules": 3.0,
    }  # fmt: skip
    assert told["carbon"] is None


def test_host_power_is_a_lower_bound_if_a_devices_power_is_unknown() -> None:
    snapshot = busy_host()
    first, *others = snapshot.domains
    partial = replace(snapshot, domains=(replace(first, power=None), *others))
    assert " ≥ " in drawn(partial)[0]
    host = document(partial).host
    assert host.power_watts is None
    assert host.least_power_watts is not None
    assert host.power_certainty is Certainty.LOWER_BOUND


def test_host_power_is_a_dash_if_every_power_is_unknown() -> None:
    snapshot = busy_host()
    unknown = tuple(replace(account, power=None) for account in snapshot.domains)
    nothing = replace(snapshot, domains=unknown)
    assert " - " in drawn(nothing)[0].replace("  ", " ")
    assert document(nothing).host.power_certainty is Certainty.UNKNOWN


def test_bounded_energy_and_power_of_rows_are_marked() -> None:
    snapshot = serving_host()
    bounded = frozenset({HwType.GPU})
    trainer, *processes = snapshot.processes
    group, *groups = snapshot.groups
    step, *spans = snapshot.spans.rows
    marked = replace(
        snapshot,
        processes=(replace(trainer, bounded=bounded), *processes),
        groups=(replace(group, bounded=bounded), *groups),
        spans=replace(snapshot.spans, rows=(replace(step, bounded=bounded), *spans)),
    )

    def cells(drawing: Snapshot, name: str) -> list[str]:
        *_, line = [line for line in drawn(drawing, width=180) if name in line]
        return [cell.strip() for cell in line.split("  ") if cell.strip()]

    assert [cell for cell in cells(marked, "train.py") if "≥" in cell] == [
        "≥ 540.1", "≥ 601.3", "≥ 90.1 kJ",
    ]  # fmt: skip
    assert [cell for cell in cells(marked, "train_step") if "≥" in cell] == [
        "≥ 80.1 kJ", "≥ 88.0 kJ", "≥ 2.13 J",
    ]  # fmt: skip
    for name in ("tritonserver", "chat gpt-oss", "containerd.service"):
        assert "≥" not in " ".join(cells(marked, name))
    withheld = replace(step, bounded=bounded, energy={HwType.GPU: Microjoules(0)})
    marked = replace(snapshot, spans=replace(snapshot.spans, rows=(withheld,)))
    assert cells(marked, "train_step").count("-") == 3, "a lower bound of 0 is unknown"


def test_domain_without_readings_says_so_and_has_no_energy() -> None:
    snapshot = busy_host()
    first, *others = snapshot.domains
    never = replace(
        first, energy=Microjoules(0), power=None, measured=False, silent=True,
        gaps={GapReason.ABSENT: 75 * 10**9},
    )  # fmt: skip
    lines = drawn(replace(snapshot, domains=(never, *others)), width=160)
    row = line_with("no reading", lines)
    assert " 0 J" not in row
    assert any("unknown (absent)" in line for line in lines)


@pytest.mark.parametrize(
    ("marked", "named"),
    [({"learned": True}, "by learned cost"), ({"learned": True, "counters": True}, "by counters")],
)
def test_division_is_marked_and_named_on_a_wide_terminal(
    marked: dict[str, bool], named: str
) -> None:
    package, *others = busy_host().domains
    host = replace(busy_host(), domains=(replace(package, **marked), *others))

    def row(width: int) -> str:
        return line_with("package-0 ", [x for x in drawn(host, width) if "core" not in x])

    assert row(100).endswith("measured +")
    assert named in row(160)
    assert line_with("package-1", drawn(host)).endswith("measured")


def test_domain_outside_the_cover_is_marked_below_its_parent() -> None:
    lines = drawn(busy_host())
    inner = line_with("package-0-core *", lines)
    assert inner.startswith("  cpu")
    assert lines.index(inner) == lines.index(line_with("cpu package-0  ", lines)) + 1


def test_emulated_host_has_a_banner() -> None:
    assert BANNER in drawn(busy_host(Provenance.EMULATED))[1]
    assert not any(BANNER in line for line in drawn(busy_host()))


def test_restricted_view_says_what_is_left_out() -> None:
    console = Console(width=100, color_system=None)
    restricted = restrict(document(busy_host()), lambda _: True, None)
    with console.capture() as captured:
        console.print(render_snapshot(restricted, ViewOptions(width=100, height=None)))
    assert "Left out: others' processes, groups, spans, totals." in captured.get()
    assert not [line for line in drawn(busy_host()) if "Left out" in line]


def test_unlisted_energy_is_summed_below_the_rows() -> None:
    host = busy_host()
    assert line_with("not listed", drawn(host)) == (
        "not listed: other ≥ 412 J, ended ≥ 95.0 J, idle ≥ 25.5 kJ, unattributed ≥ 455 J"
    )
    certain = replace(host, domains=tuple(replace(one, gaps={}) for one in host.domains))
    assert line_with("not listed", drawn(certain)) == (
        "not listed: other 412 J, ended 95.0 J, idle 25.5 kJ, unattributed 455 J"
    )


def test_gaps_and_failures_are_shown_with_remedies() -> None:
    text = "\n".join(drawn(busy_host(), width=140))
    assert "permission denied. Give the service CAP_DAC_READ_SEARCH." in text
    assert "NVIDIA H100 SXM #1: 3.2 s unknown (lost)" in text


def test_wide_terminal_shows_the_state_of_gpus() -> None:
    line = line_with("H100 SXM #0", drawn(busy_host(), width=170))
    assert "97%  1755 MHz  61 °C  cap 700 W  held down: sw_power_cap" in line


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "━━━━━"), ("ascii", "-----")])
def test_wide_terminal_shows_bars_of_its_character_set(encoding: str, bar: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, width=140, color_system=None)
    console.print(render_snapshot(document(busy_host()), ViewOptions(width=140)))
    file.seek(0)
    assert bar in line_with("H100 SXM #0", file.read().splitlines())


def test_process_name_cannot_command_the_terminal() -> None:
    assert "\x1b" not in "\n".join(drawn(busy_host()))
    assert line_with("evil", drawn(busy_host())).split()[1] == "evil?[31m?name"


def test_unknown_power_is_a_dash() -> None:
    assert line_with("evil", drawn(busy_host())).split()[2:] == ["-", "0.00", "J"]


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
@pytest.mark.parametrize("height", [16, 24, 50])
@pytest.mark.parametrize("by", ViewSection)
def test_view_fits_the_terminal(width: int, height: int, by: ViewSection) -> None:
    snapshot = busy_host(Provenance.EMULATED)
    crowd = tuple(replace(row, alive=True) for row in snapshot.processes * 40)
    lines = drawn(replace(snapshot, processes=crowd), width, height, by=by, keys=True)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert lines[-1].startswith("q quit")


def test_scrolling_shows_hidden_rows() -> None:
    crowd = busy_host().processes * 40
    snapshot = replace(busy_host(), processes=crowd)
    top = drawn(snapshot, height=24, by=ViewSection.PROCESS)
    end = drawn(snapshot, height=24, by=ViewSection.PROCESS, offset=10**6)
    assert "python train.py" in "\n".join(top)
    assert "evil" in "\n".join(end)
    assert "evil" not in "\n".join(top)


def test_filter_selects_rows_by_name_group_or_pid() -> None:
    def names(text: str) -> list[str]:
        return [row.name for row in selected(filter=text).processes]

    assert names("TRITON") == names("serving") == names("4180") == ["tritonserver"]
    assert any("none with 'zzz'" in line for line in drawn(busy_host(), filter="zzz"))


def test_rows_are_sorted_by_watts_joules_or_name() -> None:
    def first(sort: SortKey) -> str:
        return selected(sort=sort).groups[0].name

    by_watts = [row.name for row in selected().groups]
    assert by_watts == ["trainer-7f9c", "serving", "root", "containerd.service"]
    assert (first(SortKey.JOULES), first(SortKey.NAME)) == ("trainer-7f9c", "containerd.service")


def test_cyclic_parents_are_shown_once() -> None:
    snapshot = busy_host()
    account = snapshot.domains[1]
    circle = tuple(
        replace(account, domain=replace(account.domain, id=name, parent=parent))
        for name, parent in (("a", "b"), ("b", "a"))
    )
    tree = device_tree(document(replace(snapshot, domains=circle)))
    assert sorted(nested.domain.hw_id for nested in tree) == ["a", "b"]


def test_host_without_counters_refers_to_doctor() -> None:
    nothing = Snapshot(Instant(0, NOON), 0, "bare")
    text = "\n".join(drawn(nothing))
    assert "wattspan doctor" in text
    assert "none yet" in text


def test_help_lists_the_keys_on_a_narrow_terminal() -> None:
    lines = drawn(busy_host(), width=60, height=24, help=True, keys=True)
    assert any(line.startswith("/        filter") for line in lines)
    assert len(lines) <= 24


def test_devices_without_a_baseline_are_named() -> None:
    host = busy_host()
    package = replace(
        host.account("intel-rapl:0"), idle_power=None, withheld=Microjoules(20_000_000)
    )
    domains = tuple(package if one.domain.id == "intel-rapl:0" else one for one in host.domains)
    lines = drawn(replace(host, domains=domains), width=160)
    assert "by cpu-time, baseline_unknown" in line_with("package-0 ", [
        line for line in lines if "core" not in line and "!" not in line
    ])  # fmt: skip
    assert line_with("! package-0", lines).endswith("lower bound (baseline_unknown)")
    learned = replace(package, idle_power=Milliwatts(30_000))
    domains = tuple(learned if one.domain.id == "intel-rapl:0" else one for one in host.domains)
    lines = drawn(replace(host, domains=domains), width=160)
    assert not [line for line in lines if "package-0" in line and "baseline" in line]
