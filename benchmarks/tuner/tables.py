"""Results as Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from testbed.tuner.zeus_optimizer import ZEUS

from benchmarks.tuner.results import Results

GROUPS = {
    "iterations": "real iterations",
    "short": "short jobs, CV 2 %",
    "null": "nothing to save",
}
FIGURES = (
    *("runs", "over", "over_bound", "slowdown", "slowdown_most", "saving", "oracle", "share"),
    *("committed", "commit_units", "commit_units_p90", "exploration", "worst_ten_minutes_p99"),
    *("false_alarms", "bound_held", "claim_held", "claim_high_held", "claims", "false_claims"),
)
COUNTED = "last", "releases", "declines"
COMPARED = "runs", "over", "slowdown", "saving"
MOST_OVER = 0.01
MOST_ALARMS = 0.02
MIN_HELD = 0.95
MOST_NAMED = 1
OURS, LOWEST, LEAST = "wattspan", "sweep, lowest limit", "sweep, least energy"
STATIC = "static 80%"

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
            f"over {budget:.0%} in at most 1 % of runs",
            *_reached(cells, lambda c, o: o["over"] <= MOST_OVER * o["runs"]),
        ),
        (
            "the same, with the 95 % bound below 1 %",
            *_reached(cells, lambda c, o: o["over_bound"] <= MOST_OVER),
        ),
        (
            "share at least 85, 75, 60 % at CV 1, 5, 10 %",
            *_reached(long, lambda c, o: o["share"] >= c["goal"]),
        ),
        (
            "share at least 40 % in jobs of one minute, 80 % of ten",
            *_reached(short, lambda c, o: o["share"] >= c["goal"]),
        ),
        (
            "held after at most 1,200 steps at CV 1 to 2 %, 2,500 at CV 5 %",
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
                f"{end} end of the stated saving right in 95 % of runs",
                *_reached(cells, lambda c, o, key=key: _rate(o[key]) >= MIN_HELD),
            )
            for end, key in (("lower", "claim_held"), ("upper", "claim_high_held"))
        ),
        (
            "false alarms in at most 2 % of runs",
            *_reached(cells, lambda c, o: o["false_alarms"] <= MOST_ALARMS * o["runs"]),
        ),
        (
            f"*{_lowest_name(results)}: over in at most 1 % of runs*",
            *_reached(cells, lambda c, o: _share_over(_lowest(results, c)) <= MOST_OVER)[:2],
            "",
        ),
    ]
    return table(("goal", "jobs", "reached", "not reached"), rows)


def _reached(
    cells: Sequence[tuple[str, Facts, Facts]], goal: Callable[[Facts, Facts], bool]
) -> tuple[int, int, str]:
    """The number of cells, of those that reach a goal, and the names of the others."""
    missed = [name for name, cell, facts in cells if not goal(cell, facts)]
    named = "; ".join(missed) if len(missed) <= MOST_NAMED else f"{len(missed)} jobs"
    return len(cells), len(cells) - len(missed), named


def _rate(value: float | None) -> float:
    return 1.0 if value is None else value


def _median_steps(facts: Facts) -> float:
    steps = facts["commit_units"]
    return math.inf if steps is None or math.isnan(steps) else steps


def groups(results: Results) -> str:
    """Runs over the budget of each method, share of the oracle's saving and steps to a setting."""
    rows = []
    for name, chosen in _groups(results).items():
        ours = [cell["methods"][OURS] for cell in chosen]
        goals = [one for cell, one in zip(chosen, ours, strict=True) if cell["goal"]]
        shares = [one["share"] for one in goals if one["share"] is not None]
        steps = [one["commit_units"] for one in goals if one["commit_units"] is not None]
        others = [_lowest(results, cell) for cell in chosen]
        rows.append(
            (
                name,
                len(chosen),
                _over(ours),
                _over(others),
                _over([cell["methods"].get(LEAST) for cell in chosen]),
                _over([cell["methods"].get(STATIC) for cell in chosen]),
                f"{100 * max(one['slowdown_most'] for one in ours):.1f}",
                ", ".join(f"{100 * of(shares):.0f}" for of in (min, median, max) if shares) or "-",
                _whole(median(steps) if steps else None),
            )
        )
    head = (
        "jobs",
        "number",
        "runs over 5 %: wattspan",
        _lowest_name(results),
        LEAST,
        "80 % cap",
        "largest slowdown, %",
        "share, %: least, median, most",
        "steps to hold",
    )
    return table(head, rows)


def _groups(results: Results) -> dict[str, list[Facts]]:
    """The cells by noise, with or without a disturbance, and those of the other kinds."""
    found: dict[str, list[Facts]] = {}
    for name, cell, _ in _cells(results):
        noise = re.search(r"CV \d+ %", name)
        plain = cell["group"] in {"curves", "disturbed"}
        key = noise[0] if plain and noise else GROUPS[cell["group"]]
        found.setdefault(key, []).append(cell)
    return found


def _over(found: Sequence[Facts | None]) -> str:
    known = [one for one in found if one]
    return f"{sum(one['over'] for one in known):,}/{sum(one['runs'] for one in known):,}"


def jobs(results: Results) -> list[dict[str, Any]]:
    """A row of figures for each job: fractions, not percentages; empty where unknown."""
    return [
        {
            "group": cell["group"],
            "job": name,
            **{key: facts[key] for key in FIGURES},
            **{key: "; ".join(f"{one} {n}" for one, n in facts[key].items()) for key in COUNTED},
            **{
                f"{method} {key}": one[key]
                for method, one in (
                    (_lowest_name(results), _lowest(results, cell)),
                    (LEAST, cell["methods"].get(LEAST)),
                    (STATIC, cell["methods"].get(STATIC)),
                )
                if one
                for key in COMPARED
            },
        }
        for name, cell, facts in _cells(results)
    ]


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


def _percent(value: float | None, places: int) -> str:
    return "-" if value is None else f"{value * 100:.{places}f} %"


def _whole(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.0f}"
