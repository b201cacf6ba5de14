"""A snapshot comes back from the text that the exporter makes of it."""

from dataclasses import replace

import pytest
from rich.console import Console

from support.scrapes import full_host
from support.snapshots import CPU, J, busy_host
from wattspan.cli.top.controls import ViewOptions
from wattspan.cli.top.rows import snapshot_facts
from wattspan.cli.top.scraping import MetricsScrapeError, MetricsScraper, snapshot_of, with_power
from wattspan.cli.top.view import render_snapshot
from wattspan.model import Footprint, Instant, Microjoules, Provenance, Snapshot
from wattspan.testing import ManualClock
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer


def text_of(snapshot: Snapshot) -> str:
    return Renderer().render(snapshot, ExpositionFormat.TEXT).decode()


def later(snapshot: Snapshot, seconds: int, joules: int, pending: int = 0) -> Snapshot:
    """The same host ``seconds`` later, each process with ``joules`` more of CPU energy.

    Each package spent 100 J, of which so much is pending.
    """
    domains = tuple(
        replace(
            one,
            energy=Microjoules(one.energy + (100 - pending) * J),
            consumers=Microjoules(one.consumers + (100 - pending) * J),
            pending=Microjoules(one.pending + pending * J),
        )
        if one.domain.hw_type is CPU and one.attributed
        else one
        for one in snapshot.domains
    )
    processes = tuple(
        replace(row, energy={**row.energy, CPU: Microjoules(row.energy[CPU] + joules * J)})
        for row in snapshot.processes
    )
    at = snapshot.at
    at = Instant(at.mono + seconds * 10**9, at.wall + seconds * 10**9)
    return replace(snapshot, at=at, processes=processes, domains=domains)


@pytest.mark.parametrize("provenance", [Provenance.MEASURED, Provenance.EMULATED])
def test_a_scrape_tells_what_the_snapshot_told(provenance: Provenance) -> None:
    original = busy_host(provenance)
    seen, told = (
        snapshot_facts(snapshot_of(text_of(original), Instant(5, 5))),
        snapshot_facts(original),
    )
    for key in ("host", "emulated", "power_watts", "energy_joules", "idle_joules", "other_joules"):
        assert seen[key] == told[key], key
    for ours, theirs in zip(seen["domains"], told["domains"], strict=True):
        assert {k: v for k, v in ours.items() if k != "hw_parent"} == {
            k: v for k, v in theirs.items() if k != "hw_parent"
        }
    energies = {row["name"]: row["energy_joules"] for row in seen["groups"]}
    assert energies == {row["name"]: row["energy_joules"] for row in told["groups"]}
    assert seen["at_unix_seconds"] == told["at_unix_seconds"]


def test_money_and_carbon_come_back_as_they_were() -> None:
    shown = full_host().footprint
    assert snapshot_of(text_of(full_host()), Instant(5, 5)).footprint == shown
    assert shown.cost is not None
    unknown = Footprint(cost=replace(shown.cost, rate=None))
    text = text_of(replace(full_host(), footprint=unknown))
    assert snapshot_of(text, Instant(5, 5)).footprint == unknown
    assert snapshot_of(text_of(busy_host()), Instant(5, 5)).footprint == Footprint()


def test_money_from_nowhere_is_left_out() -> None:
    text = text_of(full_host())
    for strange in (text.replace('"schedule"', '"heaven"'), text.replace(" 41.250000001", " NaN")):
        assert snapshot_of(strange, Instant(5, 5)).footprint.cost is None


def test_what_the_scrape_does_not_tell_is_not_made_up() -> None:
    seen = snapshot_of(text_of(busy_host()), Instant(5, 5))
    assert seen.retired == {}
    assert all(row.power == {} for row in (*seen.processes, *seen.groups))


def test_watts_of_processes_are_what_they_spent_between_two_scrapes() -> None:
    before = snapshot_of(text_of(busy_host()), Instant(5, 5))
    after = snapshot_of(text_of(later(busy_host(), 2, 10)), Instant(6, 6))
    watts = {row.info.command: row.power.get(CPU) for row in with_power(after, before).processes}
    assert watts["tritonserver"] == 5000


@pytest.mark.parametrize(("pending", "joules"), [(0, 10), (60, 4), (90, 1), (-50, 15)])
def test_watts_of_processes_are_the_same_however_late_energy_is_settled(
    pending: int, joules: int
) -> None:
    host = busy_host()
    waiting = replace(
        host, domains=tuple(replace(one, pending=Microjoules(50 * J)) for one in host.domains)
    )
    before = snapshot_of(text_of(waiting), Instant(5, 5))
    after = snapshot_of(text_of(later(waiting, 2, joules, pending)), Instant(6, 6))
    watts = {row.info.command: row.power.get(CPU) for row in with_power(after, before).processes}
    assert watts["tritonserver"] == 5000


def test_where_nothing_is_settled_between_two_scrapes_no_watts_are_known() -> None:
    before = snapshot_of(text_of(busy_host()), Instant(5, 5))
    after = snapshot_of(text_of(later(busy_host(), 2, 0, pending=100)), Instant(6, 6))
    assert all(row.power == {} for row in with_power(after, before).processes)


def test_a_new_process_has_no_watts_yet_and_one_that_fell_neither() -> None:
    whole = snapshot_of(text_of(later(busy_host(), 0, 10)), Instant(5, 5))
    fewer = replace(whole, processes=whole.processes[1:])
    after = snapshot_of(text_of(later(busy_host(), 2, 20)), Instant(6, 6))
    assert with_power(after, fewer).processes[0].power == {}
    fallen = snapshot_of(text_of(later(busy_host(), 2, 0)), Instant(6, 6))
    assert CPU not in with_power(fallen, whole).processes[1].power


def test_a_scrape_of_the_same_figures_keeps_the_watts_it_had() -> None:
    texts = iter([text_of(busy_host()), *[text_of(later(busy_host(), 2, 10))] * 2])
    scraper = MetricsScraper("host:1", ManualClock(), lambda url: next(texts))
    first, second, third = scraper(), scraper(), scraper()
    assert first.processes[1].power == {}
    assert third is second
    assert third.processes[1].power[CPU] == 5000


def test_an_agent_that_stops_answering_leaves_its_last_figures_with_a_notice() -> None:
    clock = ManualClock(wall=busy_host().at.wall)
    answers = iter([text_of(busy_host())])

    def fetch(url: str) -> str:
        for answer in answers:
            return answer
        raise MetricsScrapeError(f"Cannot read {url}: connection refused.")

    scraper = MetricsScraper("host:1", clock, fetch)
    first = scraper()
    clock.advance(7)
    assert scraper() is first
    assert scraper.notice == (
        "Cannot read http://host:1/metrics: connection refused. These figures are 7 s old."
    )


def test_the_first_scrape_must_succeed() -> None:
    def fetch(url: str) -> str:
        raise MetricsScrapeError("Cannot read it.")

    with pytest.raises(MetricsScrapeError, match="Cannot read it"):
        MetricsScraper("host:1", ManualClock(), fetch)()


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("node7:9949", "http://node7:9949/metrics"),
        ("https://node7/", "https://node7/metrics"),
        ("http://node7/prefix/metrics", "http://node7/prefix/metrics"),
    ],
)
def test_an_address_may_be_written_short(address: str, url: str) -> None:
    asked: list[str] = []

    def fetch(url: str) -> str:
        asked.append(url)
        return text_of(busy_host())

    MetricsScraper(address, ManualClock(), fetch)()
    assert asked == [url]


@pytest.mark.parametrize(
    "text", ["", "node_cpu_seconds_total 3\n", "<html>", "a{", "wattspan_x{a=\n", "\x00"]
)
def test_an_answer_that_is_no_agents_is_refused(text: str) -> None:
    with pytest.raises(MetricsScrapeError):
        snapshot_of(text, Instant(1, 1))


def test_words_of_a_newer_agent_are_left_out_and_break_nothing() -> None:
    text = text_of(busy_host()).replace('hw_type="gpu"', 'hw_type="quantum"')
    text = text.replace('group_kind="unit"', 'group_kind="tribe"').replace(
        'provenance="measured"', 'provenance="divined"'
    )
    seen = snapshot_of(text, Instant(1, 1))
    assert {a.domain.hw_type for a in seen.domains} == {"cpu", "memory"}
    assert {a.domain.provenance for a in seen.domains} == {Provenance.ESTIMATED}
    assert "containerd.service" not in {row.group.name for row in seen.groups}


def test_a_scraped_snapshot_can_be_shown() -> None:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(
            render_snapshot(snapshot_of(text_of(busy_host()), Instant(1, 1)), ViewOptions())
        )
    assert "tritonserver" in captured.get()
    assert "package-0-core *" in captured.get()
