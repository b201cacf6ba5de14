"""Load tracking under a latency objective, against fixed settings and an oracle, in virtual time.

Everything is emulated: an engine with a model of 0.7 times the size of the 8-billion model of
testbed.continuous_batching on an H100-like board (testbed.serving_plant, whose
reaction to the clock is an assumption, see testbed.clock_scaling) serves the Azure
conversation trace (19,366 requests in 3,502 s). Each replay begins at another place of the trace,
with a tuner that knows nothing. The real decisions (wattspan.tuning.decisions.load_tracking) get
starts and ends at once and the figures of requests every 5 s; a clock takes 0.2 s.

    python -m benchmarks.serving [--replays 20] [--processes 1] [--out FILE]

With ``--pages`` it compares tracking by the engine's page, with the names and buckets of vLLM, to
tracking by announced spans; both against the original setting of the same replay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations_with_replacement
from pathlib import Path

from testbed.serving_replay import (
    EXTRA,
    PERIOD,
    SETTINGS,
    Announced,
    Arrival,
    Control,
    Scraped,
    Source,
    bursty,
    by_bin,
    doubled,
    fixed,
    objectives_of,
    rotated,
    serve,
    tracking,
)

from wattspan.emulation.boards import H100


def tables() -> list[tuple[int, ...]]:
    """Settings of three bins that do not become lower with the load."""
    order = range(len(SETTINGS) - 1, -1, -1)
    return list(combinations_with_replacement(order, 3))


class Compared:
    """Savings and additional misses, relative to the original setting, on one list of arrivals."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self.arrivals = arrivals
        self.original = serve(arrivals, fixed(0))

    def run(self, control: Control) -> tuple[float, float]:
        one = serve(self.arrivals, control)
        return 1 - one.energy / self.original.energy, one.missed - self.original.missed

    def oracle(self) -> tuple[tuple[int, ...], float]:
        """The table and the dwell time that save most within the permitted misses."""
        found = [
            (*self.run(by_bin(table, dwell)), table, dwell)
            for table in tables()
            for dwell in (0.0, 60.0)
        ]
        _, _, table, dwell = max(one for one in found if one[1] <= EXTRA)
        return table, dwell

    def single(self) -> int:
        """The single setting that saves most within the permitted misses."""
        found = [(*self.run(fixed(setting)), setting) for setting in range(len(SETTINGS))]
        return max(one for one in found if one[1] <= EXTRA)[2]

    def results(
        self, oracle: tuple[tuple[int, ...], float], single: int, *, literal: bool = False
    ) -> dict[str, float]:
        found: dict[str, float] = {"original_missed": self.original.missed}
        found["saved"], found["extra"] = self.run(tracking())
        found["oracle"], found["oracle_extra"] = self.run(by_bin(*oracle))
        found["single"], found["single_extra"] = self.run(fixed(single))
        if literal:
            found["literal_saved"], found["literal_extra"] = self.run(tracking(every_bin=True))
        return found


def restored(seed: int, at: float = 1200) -> float | None:
    """Seconds from a step to twice the load until the original is in force; None: not lowered."""
    clocks = serve(doubled(seed, at=at), tracking(), tick=0.5).clocks
    before = [clock for time, clock in clocks if time <= at][-1]
    if before == SETTINGS[0]:
        return None
    back = [time - at for time, clock in clocks if time > at and clock == H100.silicon.max_mhz]
    return back[0] if back else float("inf")


def replayed(
    part: float, oracle: tuple[tuple[int, ...], float], single: int, *, literal: bool
) -> dict[str, float]:
    """The results of one replay from a part of the trace on."""
    return Compared(rotated(part)).results(oracle, single, literal=literal)


def compared_bursty() -> dict[str, float]:
    """The results of the bursty trace, with an oracle and a single setting of its own."""
    burst = Compared(bursty())
    return burst.results(burst.oracle(), burst.single())


def measure(replays: int, processes: int = 1) -> dict[str, object]:
    """All runs; the oracle's table and the single setting are chosen on the trace as recorded."""
    with ProcessPoolExecutor(processes) as pool:
        bursts = pool.submit(compared_bursty)
        recorded = Compared(rotated(0.0))
        oracle, single = recorded.oracle(), recorded.single()
        print("oracle", oracle, "single", single, file=sys.stderr, flush=True)
        steps = pool.map(restored, range(replays))
        runs = [
            pool.submit(replayed, number / replays, oracle, single, literal=number < 3)
            for number in range(replays)
        ]
        results: dict[str, object] = {
            "replays": [one.result() for one in runs],
            "bursty": bursts.result(),
            "steps": list(steps),
            "oracle": oracle,
            "single": single,
        }
    print(json.dumps(results), file=sys.stderr, flush=True)
    return results


def table(results: dict[str, object]) -> str:
    """The results in Markdown."""
    runs, burst, steps = results["replays"], results["bursty"], results["steps"]
    assert isinstance(runs, list)
    assert isinstance(burst, dict)
    assert isinstance(steps, list)
    mean = {
        key: statistics.fmean(run[key] for run in runs) for key in runs[0] if "literal" not in key
    }
    literal = [run["literal_saved"] for run in runs if "literal_saved" in run]
    lowered = [one for one in steps if one is not None]
    soon = sum(one <= PERIOD for one in lowered)
    share = statistics.fmean(run["saved"] for run in runs) / mean["oracle"]
    worst = max(run["extra"] for run in runs)
    return "\n".join(
        (
            "| quantity (emulated) | result | goal |",
            "|---|---|---|",
            f"| replays | {len(runs)} | 20 |",
            f"| requests over a limit at the original setting | {mean['original_missed']:.2%} | |",
            f"| additional ones with load tracking, mean and most of all replays | "
            f"{100 * mean['extra']:.2f}, {100 * worst:.2f} percentage points | ≤ 0.5 |",
            f"| saved by load tracking, learning included | {mean['saved']:.1%} | |",
            f"| saved by an oracle: the best table of settings by load bin, known in advance | "
            f"{mean['oracle']:.1%} | |",
            f"| share of that oracle | {share:.0%} | ≥ 70 % |",
            f"| saved by the best single setting, known in advance | {mean['single']:.1%} | |",
            f"| saved if every bin ever met must be certified ({len(literal)} replays) | "
            f"{statistics.fmean(literal):.1%} | |",
            f"| bursty trace: load tracking, single setting | {burst['saved']:.1%}, "
            f"{burst['single']:.1%} | ≥ 3 points more |",
            f"| bursty trace: additional misses of both | {100 * burst['extra']:.2f}, "
            f"{100 * burst['single_extra']:.2f} points | ≤ 0.5 |",
            f"| step to twice the load: original in force within one period ({PERIOD} s) | "
            f"{soon} of {len(lowered)}, and at the step already in "
            f"{len(steps) - len(lowered)} | all |",
            f"| the same, median and most | {statistics.median(lowered):.1f} s, "
            f"{max(lowered):.1f} s | ≤ {PERIOD} s |",
        )
    )


PAGES = {
    "1 s": (1, False),
    "5 s": (5, False),
    "5 s, times of tokens": (5, True),
}
"""Interval of the page in seconds, and whether it times single tokens instead of requests."""

LIMITS = (0.5, 0.4)
"""Seconds to the first token: a bound of vLLM's histogram, and one between 0.25 and 0.5 s."""


def by_page(part: float, limit: float) -> dict[str, tuple[float, float]]:
    """Saving and additional misses of one replay, by announced spans ("") and by pages."""
    arrivals, objectives = rotated(part), objectives_of(limit)
    original = serve(arrivals, fixed(0), objectives=objectives)
    sources: dict[str, Source] = {"": Announced()}
    for name, (interval, by_token) in PAGES.items():
        sources[name] = Scraped(interval, objectives, by_token=by_token)
    found = {}
    for name, source in sources.items():
        control = tracking(objectives=objectives)
        one = serve(arrivals, control, source=source, objectives=objectives)
        found[name] = 1 - one.energy / original.energy, one.missed - original.missed
    return found


def page_table(replays: int, processes: int) -> str:
    """The comparison in Markdown."""
    lines = [
        "| limit | source | saved | share of spans | additional misses: mean, most (points) |",
        "|---|---|---|---|---|",
    ]
    parts = [number / replays for number in range(replays)]
    with ProcessPoolExecutor(processes) as pool:
        for limit in LIMITS:
            runs = list(pool.map(by_page, parts, [limit] * replays))
            spans = statistics.fmean(run[""][0] for run in runs)
            for name in runs[0]:
                saved = statistics.fmean(run[name][0] for run in runs)
                extra = [100 * run[name][1] for run in runs]
                cells = (
                    f"{limit} s",
                    f"page each {name}" if name else "announced spans",
                    f"{saved:.1%}",
                    f"{saved / spans:.0%}",
                    f"{statistics.fmean(extra):.2f}, {max(extra):.2f}",
                )
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--replays", type=int, default=20)
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--out", type=Path, help="keep the figures as JSON in this file")
    options.add_argument("--table", type=Path, help="print the table of such a file")
    options.add_argument("--pages", action="store_true", help="compare spans and pages")
    chosen = options.parse_args()
    if chosen.pages:
        print(page_table(chosen.replays, chosen.processes))
        return
    if chosen.table is not None:
        print(table(json.loads(chosen.table.read_text(encoding="utf-8"))))
        return
    results = measure(chosen.replays, chosen.processes)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
