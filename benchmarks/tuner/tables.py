"""Results as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from testbed.tuner.zeus_optimizer import ZEUS

from benchmarks.tuner.results import Results

GROUPS = {
    "curves": "measured curves",
    "iterations": "real iterations",
    "short": "short jobs",
    "disturbed": "one thing after another goes wrong",
    "null": "nothing to save",
}
MOST_OVER = 0.01
MOST_ALARMS = 0.02
MIN_HELD = 0.95
OURS, LOWEST, LEAST = "wattspan", "sweep, lowest limit", "sweep, least energy"

Facts = dict[str, Any]


def machine(results: Results) -> str:
    """Parameters of the table."""
    facts = results["table"]
    runs = [cell["methods"][OURS]["runs"] for _, cell, _ in _cells(results)]
    each = f"{min(runs)}" if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"
    hours = sum(cell["hours"] * cell["methods"][OURS]["runs"] for _, cell, _ in _cells(results))
    return (
        f"{len(runs)} jobs, {each} runs each, {hours / 8766:.0f} years of work "
        f"in simulated time; core {facts['core']}. {facts['machine']}"
    )


def goals(results: Results) -> str:
    """Number of cells that reach each goal, and the ones that do not."""
    budget = results["table"]["budget"]
    cells = list(_cells(results))
    with_goal = [(n, c, o) for n, c, o in cells if c["goal"] and o["share"] is not None]
    long = [one for one in with_goal if one[1]["group"] != "short"]
    short = [one for one in with_goal if one[1]["group"] == "short"]
    held = [one for one in cells if one[1]["steps_goal"]]
    rows = [
        (
            f"whole-run slowdown over {budget:.0%} in at most 1 % of runs",
            *_reached(cells, lambda c, o: o["over"] <= MOST_OVER * o["runs"]),
        ),
        (
            "the same, with the 95 % bound below 1 %",
            *_reached(cells, lambda c, o: o["over_bound"] <= MOST_OVER),
        ),
        (
            "saving at least 85 / 75 / 60 % of the oracle's at CV 1 / 5 / 10 %",
            *_reached(long, lambda c, o: o["share"] >= c["goal"]),
        ),
        (
            "40 % of it in jobs of one minute, 80 % in those of ten",
            *_reached(short, lambda c, o: o["share"] >= c["goal"]),
        ),
        (
            "held after at most 1,200 steps at CV 1 to 2 %, 2,500 at CV 5 % (median)",
            *_reached(held, lambda c, o: _median_steps(o) <= c["steps_goal"]),
        ),
        (
            "no more energy than uncapped (0.2 %)",
            *_reached(cells, lambda c, o: o["saving"] >= -0.002),
        ),
        (
            "nothing claimed where nothing is saved",
            *_reached([one for one in cells if one[1]["null"]], lambda c, o: not o["false_claims"]),
        ),
        *(
            (
                f"{end} end of the stated saving right in at least 95 % of runs",
                *_reached(cells, lambda c, o, key=key: _rate(o[key]) >= MIN_HELD),
            )
            for end, key in (("lower", "claim_held"), ("upper", "claim_high_held"))
        ),
        (
            "false alarms in at most 2 % of runs",
            *_reached(cells, lambda c, o: o["false_alarms"] <= MOST_ALARMS * o["runs"]),
        ),
        (
            f"*{_lowest_name(results)}: over budget in at most 1 % of runs*",
            *_reached(cells, lambda c, o: _share_over(_lowest(results, c)) <= MOST_OVER)[:2],
            "",
        ),
        (
            "*sweep, least energy: over budget in at most 1 % of runs*",
            *_reached(cells, lambda c, o: _share_over(c["methods"].get(LEAST)) <= MOST_OVER)[:2],
            "",
        ),
    ]
    return table(("goal", "cells", "reached", "not reached"), rows)


def _reached(
    cells: Sequence[tuple[str, Facts, Facts]], goal: Callable[[Facts, Facts], bool]
) -> tuple[int, int, str]:
    """The number of cells, of those that reach a goal, and the names of the others."""
    missed = [name for name, cell, facts in cells if not goal(cell, facts)]
    named = "; ".join(missed) if len(missed) <= len(cells) / 2 else f"{len(missed)} jobs"
    return len(cells), len(cells) - len(missed), named


def _rate(value: float | None) -> float:
    return 1.0 if value is None else value


def _median_steps(facts: Facts) -> float:
    steps = facts["commit_units"]
    return math.inf if steps is None or math.isnan(steps) else steps


def ours(results: Results, group: str) -> str:
    """The project's tuner in a group of cells."""
    rows = [
        (
            name,
            f"{facts['over']}/{facts['runs']}",
            _percent(facts["over_bound"], 2),
            f"{_percent(facts['slowdown'], 2)} / {_percent(facts['slowdown_most'], 2)}",
            _percent(facts["saving"], 1),
            _percent(facts["oracle"], 1),
            _share(facts, cell),
            _percent(facts["committed"], 0),
            f"{_whole(facts['commit_units'])} ({_whole(facts['commit_units_p90'])})",
            f"{facts['exploration']:.0f}",
            _percent(facts["worst_ten_minutes_p99"], 0),
            str(facts["false_alarms"]),
        )
        for name, cell, facts in _cells(results)
        if cell["group"] == group
    ]
    head = (
        "job",
        "over budget",
        "bound",
        "slowdown, mean / most",
        "saving",
        "oracle",
        "share",
        "held",
        "steps to commit (p90)",
        "lost, s",
        "worst 10 min, p99",
        "false alarms",
    )
    return table(head, rows)


def beside(results: Results, group: str) -> str:
    """Results of the alternatives with the same jobs and the same random events."""
    rows = []
    for name, cell, facts in _cells(results):
        if cell["group"] != group:
            continue
        row = [name, _percent(facts["oracle"], 1)]
        methods = cell["methods"]
        lowest = _lowest(results, cell)
        for one in (methods[OURS], lowest, methods.get(LEAST), methods.get("static 80%")):
            if one is None:
                row.append("-")
                continue
            row.append(
                f"{_percent(one['over'] / one['runs'], 0)} · {_percent(one['slowdown'], 1)} · "
                f"{_percent(one['saving'], 1)}"
            )
        rows.append(row)
    names = _lowest_name(results), "sweep, least energy", "80 %"
    head = ("job", "oracle saves", "wattspan", *names)
    return table(head, rows)


def reasons(results: Results) -> str:
    """Ends of runs, if not always with a held setting."""
    rows = []
    for name, _, facts in _cells(results):
        ends = ", ".join(
            f"{last} {count / facts['runs']:.0%}" for last, count in facts["last"].items()
        )
        lets = ", ".join(f"{reason} {count}" for reason, count in facts["releases"].items())
        turned = ", ".join(f"{reason} {count}" for reason, count in facts["declines"].items())
        if set(facts["last"]) != {"hold: certified"} or lets:
            rows.append((name, ends, lets, turned))
    return table(("job", "at the end", "releases", "declined, once or for good"), rows)


def honesty(results: Results) -> str:
    """Accuracy of the tuner's report of itself."""
    rows = [
        (
            name,
            _percent(facts["bound_held"], 1),
            _percent(facts["claim_held"], 1),
            _percent(facts["claim_high_held"], 1),
            f"{facts['claims']}/{facts['runs']}",
            facts["false_claims"],
        )
        for name, _, facts in _cells(results)
    ]
    head = (
        "job",
        "slowdown within its bound",
        "saving above its low end",
        "below its high end",
        "runs with a claim",
        "claims above the truth",
    )
    return table(head, rows)


def lengths(results: Results) -> str:
    """Effect of the length of a job."""
    rows = [
        (
            one["cell"],
            f"{one['units']:,}",
            method,
            f"{facts['over']}/{facts['runs']}",
            _percent(facts["slowdown"], 2),
            _percent(facts["saving"], 1),
            "-" if facts["share"] is None else _percent(facts["share"], 0),
        )
        for one in results["lengths"]
        for method, facts in one["methods"].items()
    ]
    return table(("job", "steps", "method", "over budget", "slowdown", "saving", "share"), rows)


def batches(results: Results) -> str:
    """Effect of the reporting interval of units."""
    rows = [
        (
            one["cell"],
            f"{one['batch']:g} s",
            f"{facts['over']}/{facts['runs']}",
            _percent(facts["slowdown"], 2),
            _percent(facts["saving"], 1),
            _percent(facts["share"], 0),
            f"{_whole(facts['commit_units'])} ({_whole(facts['commit_units_p90'])})",
        )
        for one in results["batches"]
        for facts in (one["methods"][OURS],)
    ]
    head = ("job", "a batch every", "over budget", "slowdown", "saving", "share", "steps to commit")
    return table(head, rows)


def certification(results: Results) -> str:
    """Rate of held settings by true slowdown."""
    found = results["certification"]
    noises = sorted({one["cv"] for one in found})
    rows = []
    for slowdown in sorted({one["slowdown"] for one in found}):
        row = [f"{slowdown:.1%}"]
        for remembered in (False, True):
            for cv in noises:
                same = [
                    f"{one['held']}/{one['runs']} (≤ {one['bound']:.1%})"
                    for one in found
                    if (one["slowdown"], one["cv"], one["remembered"]) == (slowdown, cv, remembered)
                ]
                row.append(same[0] if same else "-")
        rows.append(row)
    head = ["true slowdown", *(f"searched, CV {cv:.0%}" for cv in noises)]
    return table([*head, *(f"remembered, CV {cv:.0%}" for cv in noises)], rows)


def detection(results: Results) -> str:
    """Detection delay of a change."""
    rows = [
        (
            f"{one['slowdown']:.0%}, {'seen by comparison' if one['hidden'] else 'seen in steps'}",
            f"{one['cv']:.0%}",
            f"{one['released']}/{one['runs']}",
            f"{_number(one['sentinels'])} ({_number(one['sentinels_p90'])})",
            f"{_whole(one['units'])} ({_whole(one['units_p90'])})",
            f"{_whole(one['seconds'])} ({_whole(one['seconds_p90'])})",
            f"{one['early']}",
        )
        for one in results["detection"]
    ]
    head = (
        "jump to",
        "CV",
        "released",
        "comparisons (p90)",
        "steps (p90)",
        "seconds (p90)",
        "let go before",
    )
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _cells(results: Results) -> Iterator[tuple[str, Facts, Facts]]:
    for cell in results["table"]["cells"]:
        if OURS in cell["methods"]:
            yield cell["name"], cell, cell["methods"][OURS]


def _lowest(results: Results, cell: Facts) -> Facts | None:
    """The real package where it ran, otherwise our implementation of its rule."""
    if "zeus" in results:
        found: Facts | None = results["zeus"].get(cell["name"])
        return found
    return cell["methods"].get(LOWEST)


def _lowest_name(results: Results) -> str:
    return ZEUS if "zeus" in results else LOWEST


def _share_over(facts: Facts | None) -> float:
    return facts["over"] / facts["runs"] if facts else 0.0


def _share(facts: Facts, cell: Facts) -> str:
    if facts["share"] is None or cell["goal"] is None:
        return "-"
    text = _percent(facts["share"], 0)
    return text if facts["share"] >= cell["goal"] else f"**{text}**"


def _percent(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value * 100:.{places}f} %"


def _whole(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.1f}"
