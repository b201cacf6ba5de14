"""Everything that is asked of Prometheus, asked: a real one scrapes an emulated host at work.

The host trains, serves tokens, is tuned and has a price. Every query of every panel must have an
answer there, or stand in ``UNANSWERED`` with its reason; every recording rule must have samples;
and on a host where nothing is wrong no alert may fire.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dashboards
import pytest
import yaml
from dashboards.queries import Query, Variable
from testbed.prometheus_server import Prometheus, scraping
from testbed.requirements import ROOT
from testbed.spans.agent import free_port
from testbed.waiting import eventually
from testbed.watched_host import watched_host

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_prometheus]

RULES = ROOT / "dashboards" / "prometheus"
INTERVAL, SPAN, RATE = "1s", 60, "10s"
WITHIN = 120.0  # seconds; most answers are there within fifteen

NOT_HELD = "there is none before a setting is held, which takes the tuner minutes"
NOT_TRACKED = "no job here follows the load of a server"
NO_FLEET = "this host shares no power budget"
NO_ENGINE = "no engine's page is read here; tests/unit/dashboards/test_rules.py gives it one"
NEVER_YET = "each reason has a series from its first time on, and here there is none"
UNANSWERED = {
    "wattspan-autotuner/Clock caps/A": "power limits are turned here, clocks are not",
    "wattspan-autotuner/Decisions/Marks": "a job is released or declined after minutes, if at all",
    "wattspan-autotuner/Jobs/E": NOT_HELD,
    "wattspan-autotuner/Load of tracked servers/A": NOT_TRACKED,
    "wattspan-autotuner/New caps/Marks": NOT_HELD,
    "wattspan-autotuner/Requests in flight of tracked servers/A": NOT_TRACKED,
    "wattspan-autotuner/Requests in flight of tracked servers/B": NOT_TRACKED,
    "wattspan-autotuner/Requests over a latency limit/A": NOT_TRACKED,
    "wattspan-autotuner/Saving at the held setting/A": NOT_HELD,
    "wattspan-autotuner/Saving of a unit of work/A": NOT_HELD,
    "wattspan-autotuner/Setting and its speed/A": NOT_HELD,
    "wattspan-autotuner/Setting and its speed/B": NOT_HELD,
    **{f"wattspan-fleet/Allotments of hosts/{letter}": NO_FLEET for letter in "ABCD"},
    "wattspan-fleet/Firing alerts/A": "on a host where nothing is wrong none may",
    **{f"wattspan-fleet/Limits and budgets of places/{letter}": NO_FLEET for letter in "ABC"},
    **{f"wattspan-fleet/Places/{letter}": NO_FLEET for letter in "ABCDEF"},
    **{
        f"wattspan-{board}/Provenance/B": "the certainty here is `known`"
        for board in ("autotuner", "fleet", "gpus", "host", "processes", "spans")
    },
    **{f"wattspan-spans/Engines/{letter}": NO_ENGINE for letter in "ABCDEFGHIJK"},
    "wattspan-spans/Forwarded to your collector/C": NEVER_YET,
    **{
        f"wattspan-spans/{panel}/A": NO_ENGINE
        for panel in (
            "Idle share of engines",
            "Joules per request of engines",
            "Joules per token of engines",
            "Tokens of engines",
            "Unreadable engine pages",
        )
    },
    "wattspan-spans/Received, deferred, refused/C": NEVER_YET,
    "wattspan-spans/Requests without known energy/A": "the energy of all requests here is known",
}
"""Queries without data here, by dashboard, panel and letter, and why that is so."""

OF_THE_MACHINE = {"WattspanAgentBehind", "WattspanAgentCpuHigh"}
"""Alerts that say the machine is full, as one is that runs tests on all its cores."""


@dataclass(frozen=True)
class Watched:
    """A Prometheus that scrapes the host, and the possible values of dashboard variables."""

    prometheus: Prometheus
    instance: str

    def values(self, variable: Variable, chosen: Mapping[str, str]) -> list[str]:
        """Values that Grafana would offer for selection."""
        selector = dashboards.fill(variable.selector, chosen)
        found = self.prometheus.get(
            f"label/{variable.label}/values", **({"match[]": selector} if selector else {})
        )
        return [str(value) for value in found]

    def choices(self, variables: tuple[Variable, ...]) -> Iterator[dict[str, str]]:
        """Every way to choose: of several at once all, of one after the other each."""
        if not variables:
            yield {}
            return
        *before, last = variables
        for chosen in self.choices(tuple(before)):
            found = self.values(last, chosen)
            if last.multi and found:
                found = [".*"] if last.all else ["|".join(map(re.escape, found))]
            for value in found:
                yield {**chosen, last.name: value.replace("\\", "\\\\")}

    def answer(self, query: Query) -> bool:
        """True if Prometheus has samples for some choice of the variables."""
        return any(self.ask(query, chosen) for chosen in self.choices(query.variables))

    def ask(self, query: Query, chosen: Mapping[str, str]) -> bool:
        expr = dashboards.fill(query.expr, chosen, rate_interval=RATE, span=f"{SPAN}s")
        now = time.time()
        if query.instant:
            result = self.prometheus.get("query", query=expr)["result"]
        else:
            span = {"start": str(now - SPAN), "end": str(now), "step": "1"}
            result = self.prometheus.get("query_range", query=expr, **span)["result"]
        return any(
            not math.isnan(float(value))
            for series in result
            for _, value in series.get("values") or [series["value"]]
        )


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    rules = [at_short_notice(RULES / name, folder) for name in ("recording.yml", "alerts.yml")]
    with ExitStack() as stack:
        instance = stack.enter_context(watched_host(folder)).address()
        job = {"job_name": "wattspan", "static_configs": [{"targets": [instance]}]}
        prometheus = stack.enter_context(
            scraping(
                folder, free_port(), [job], INTERVAL, features=["exemplar-storage"], rules=rules
            )
        )
        yield Watched(prometheus, instance)


def at_short_notice(path: Path, folder: Path) -> Path:
    """A copy of rules that are evaluated every second, and whose alerts wait for ten."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"interval: \S+", f"interval: {INTERVAL}", text)
    text = re.sub(r"^( +)for: \S+", r"\1for: 10s", text, flags=re.MULTILINE)
    copy = folder / path.name
    copy.write_text(text, encoding="utf-8")
    return copy


def label(query: Query) -> str:
    return f"{query.dashboard}/{query.panel}/{query.ref}"


# ------------------------------------------------------------------------------------ the tests


def test_every_recording_rule_has_samples(watched: Watched) -> None:
    groups = yaml.safe_load((RULES / "recording.yml").read_text(encoding="utf-8"))["groups"]
    groups = [group for group in groups if group["name"] != "wattspan_engines"]  # NO_ENGINE
    names = {rule["record"] for group in groups for rule in group["rules"]}

    def missing() -> set[str]:
        found = watched.prometheus.get("query", query='{__name__=~".+:wattspan_.+"}')["result"]
        return names - {series["metric"]["__name__"] for series in found}

    until_none(missing)


def test_every_variable_of_every_dashboard_has_something_to_choose(watched: Watched) -> None:
    asked = {(query.dashboard, query.variables) for query in dashboards.queries()}
    assert len(asked) >= 6

    def empty() -> set[str]:
        return {
            f"{dashboard}: ${variables[length - 1].name}"
            for dashboard, variables in asked
            for length in range(1, len(variables) + 1)
            if not any(True for _ in watched.choices(variables[:length]))
        }

    until_none(empty)


def test_every_query_of_every_panel_has_data_or_a_reason(watched: Watched) -> None:
    waiting = {
        label(query): query for query in dashboards.queries() if label(query) not in UNANSWERED
    }
    assert waiting

    def unanswered() -> set[str]:
        for name, query in list(waiting.items()):
            if watched.answer(query):
                del waiting[name]
        return set(waiting)

    until_none(unanswered)


def test_known_empty_queries_exist_on_dashboards(
    watched: Watched,
) -> None:
    known = {label(query): query for query in dashboards.queries()}
    assert set(UNANSWERED) <= set(known)
    for place in UNANSWERED:
        watched.answer(known[place])  # it must succeed


def test_panel_that_leads_to_traces_has_exemplars(watched: Watched) -> None:
    asking = [query for query in dashboards.queries() if query.exemplar]
    assert asking

    def without() -> set[str]:
        return {label(query) for query in asking if not exemplars(watched, query)}

    until_none(without)


def exemplars(watched: Watched, query: Query) -> list[Any]:
    now = time.time()
    return list(
        itertools.chain.from_iterable(
            watched.prometheus.get(
                "query_exemplars",
                query=dashboards.fill(query.expr, chosen, rate_interval=RATE, span=f"{SPAN}s"),
                start=str(now - 600),
                end=str(now + 60),
            )
            for chosen in watched.choices(query.variables)
        )
    )


def test_healthy_host_fires_no_alert(watched: Watched) -> None:
    """Asked last, when all that begins has begun: an alert may stand until something is known."""

    def firing() -> set[str]:
        return set(watched.prometheus.query('ALERTS{alertstate="firing"}', "alertname"))

    def unsound() -> set[str]:
        groups = watched.prometheus.get("rules", type="alert")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return {rule["name"] for rule in rules if rule["health"] != "ok"} if rules else {"all"}

    until_none(unsound)  # before its first evaluation nothing is known of a rule
    until_none(lambda: firing() - OF_THE_MACHINE)


def until_none(left: Callable[[], set[str]]) -> None:
    """Wait until ``left`` is empty; the remaining entries are the failure."""
    seen: set[str] = {"everything"}

    def none() -> bool:
        nonlocal seen
        seen = left()
        return not seen

    try:
        eventually(none, "everything has an answer", within=WITHIN)
    except AssertionError:
        pytest.fail(f"after {WITHIN:g} s: {', '.join(sorted(seen))}", pytrace=False)
