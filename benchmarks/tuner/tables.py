"""Results as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.tuner.results import Results

GROUPS = {
    "curves": "measured curves",
    "iterations": "real iterations",
    "disturbed": "one thing after another goes wrong",
    "null": "nothing to save",
}
MOST_OVER = 0.01
OURS, LOWEST, LEAST = "wattspan", "sweep, lowest limit", "sweep, least energy"

Facts = dict[str, Any]


def machine(results: Results) -> str:
    """Parameters of the table."""
    facts = results["table"]
    runs = [cell["methods"][OURS]["runs"] for _, cell, _ in _cells(results)]
    hours = sum(cell["hours"] * cell["methods"][OURS]["runs"] for _, cell, _ in _cells(results))
    return (
        f"{len(runs)} jobs, {min(runs)} to {max(runs)} runs each, {hours / 8766:.0f} years of work "
        f"in simulated time; core {facts['core']}. {facts['machine']}"
    )


def goals(results: Results) -> str:
    """Number of cells that reach each goal, and the ones that do not."""
    budget = results["table"]["budget"]
    cells = list(_cells(results))
    over = [name for name, _, ours in cells if ours["over"] / ours["runs"] > MOST_OVER]
    unsure = [name for name, _, ours in cells if ours["over_bound"] > MOST_OVER]
    with_goal = [(n, c, o) for n, c, o in cells if c["goal"] and o["share"] is not None]
    less = [n for n, c, o in with_goal if o["share"] < c["goal"]]
    costs = [n for n, _, o in cells if o["saving"] < -0.002]
    alarms = [n for n, _, o in cells if o["false_alarms"] > 0.05 * o["runs"]]
    claims = [n for n, c, o in cells if c["null"] and o["false_claims"]]
    sweep = [n for n, c, _ in cells if _share_over(c, LOWEST) > MOST_OVER]
    energy = [n for n, c, _ in cells if _share_over(c, LEAST) > MOST_OVER]
    total = len(cells)
    rows = [
        (
            f"whole-run slowdown over {budget:.0%} in at most 1 % of runs",
            total,
            total - len(over),
            over,
        ),
        ("the same, with the 95 % bound below 1 %", total, total - len(unsure), unsure),
        (
            "saving at least 80 / 60 / 45 % of the oracle's at CV 1 / 5 / 10 %",
            len(with_goal),
            len(with_goal) - len(less),
            less,
        ),
        ("no more energy than uncapped (0.2 %)", total, total - len(costs), costs),
        (
            "nothing claimed where nothing is saved",
            sum(bool(c["null"]) for _, c, _ in cells),
            sum(bool(c["null"]) for _, c, _ in cells) - len(claims),
            claims,
        ),
        ("false alarms in at most 5 % of runs", total, total - len(alarms), alarms),
        (
            "*sweep, lowest limit: over budget in at most 1 % of runs*",
            total,
            total - len(sweep),
            [],
        ),
        (
            "*sweep, least energy: over budget in at most 1 % of runs*",
            total,
            total - len(energy),
            [],
        ),
    ]
    return table(
        ("goal", "cells", "reached", "not reached"),
        [(goal, cells_, met, _named(names, cells_)) for goal, cells_, met, names in rows],
    )


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
        for method in (OURS, LOWEST, LEAST, "static 80%"):
            one = cell["methods"].get(method)
            if one is None:
                row.append("-")
                continue
            row.append(
                f"{_percent(one['over'] / one['runs'], 0)} · {_percent(one['slowdown'], 1)} · "
                f"{_percent(one['saving'], 1)}"
            )
        rows.append(row)
    head = ("job", "oracle saves", "wattspan", "sweep, lowest", "sweep, least energy", "80 %")
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
            f"{facts['claims']}/{facts['runs']}",
            facts["false_claims"],
        )
        for name, _, facts in _cells(results)
    ]
    head = (
        "job",
        "slowdown within its bound",
        "saving above its low end",
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


def compare(results: Results) -> str:
    """A dozen jobs under the core of this tree and of an earlier one."""
    found = results["compare"]

    def cells(one: Any) -> tuple[str, ...]:
        return (
            f"{_whole(one['commit_units'])} ({_whole(one['commit_units_p90'])})",
            _percent(one["share"], 0),
            _percent(one["slowdown_most"], 2),
            f"{one['over']}/{one['runs']}",
            str(one["false_alarms"]),
        )

    head = ["job"]
    for core in ("", ", before"):
        head += [f"{name}{core}" for name in _COMPARED]
    rows = [(one["name"], *cells(one["ours"]), *cells(one["other"])) for one in found["jobs"]]
    label = (
        f"Core {found['core']}; before: commit `{found['commit']}`. The numbers of runs are in the "
        f"columns *over budget*. {found['machine']}"
    )
    return f"{label}\n\n{table(head, rows)}"


_COMPARED = ("steps to hold (p90)", "share", "most slowdown", "over budget", "false alarms")


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


def _named(names: Sequence[str], of: int) -> str:
    """Which ones, unless they are nearly all."""
    return "; ".join(names) if len(names) <= of / 2 else f"{len(names)} jobs"


def _cells(results: Results) -> Iterator[tuple[str, Facts, Facts]]:
    for cell in results["table"]["cells"]:
        if OURS in cell["methods"]:
            yield cell["name"], cell, cell["methods"][OURS]


def _share_over(cell: Facts, method: str) -> float:
    facts = cell["methods"].get(method)
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
