"""Joules per token of serving engines from their own counters, against known truth.

Everything is emulated in virtual time, as by benchmarks/llm_requests.py. The page of an engine has
the names of vLLM, whose counters move with each iteration, of SGLang, which counts generated tokens
once in 40 passes, or of TensorRT-LLM, which counts when a request finishes. It is read every 5 s,
and each reading takes 4 ms. The counter of a board is updated every 100 ms. The real reader of
pages (wattspan.inference.engine_metrics) and the real arithmetic (wattspan.inference.engine_energy)
get these only.

    .venv/bin/python -m benchmarks.engine_metrics [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from testbed.continuous_batching import ModelCosts
from testbed.engine_pages import FINISH, SGLANG, VLLM, EmulatedPages
from testbed.serving_engines import (
    BEGIN,
    ServingEngine,
    at_rest,
    counter_steps,
    pair,
    quantile,
    run_engines,
    single,
)

from wattspan.inference.engine_energy import (
    EngineEnergy,
    EngineFigures,
    EngineInterval,
    Estimate,
    edge_doubt,
)
from wattspan.inference.engine_metrics import progress, read_page
from wattspan.model import MILLISECOND, SECOND, Microjoules
from wattspan.spans.interval_pool import CounterStep

READ_EVERY, WINDOW = 5, 60  # seconds
LEARNED = 300  # seconds after which figures count
TOOK = 4 * MILLISECOND


class Reading(NamedTuple):
    """The figures of a minute and its truth in joules: of prompts, of output, of waiting."""

    figures: EngineFigures
    input: float
    output: float
    waiting: float
    tokens: tuple[int, int]  # by the counters: input, output


def energy_of(steps: Sequence[CounterStep], start: int, end: int) -> tuple[float, float]:
    """The microjoules of a period, and the half-width at its end."""
    total = doubt = 0.0
    first = max(0, (start - steps[0].start) // (steps[0].end - steps[0].start) - 1)
    for step in steps[first:]:
        if step.start > end:
            break
        overlap = min(end, step.end) - max(start, step.start)
        if overlap > 0:
            total += step.energy * overlap / (step.end - step.start)
        if step.start <= end < step.end:
            doubt = edge_doubt(Microjoules(step.energy), step.end - step.start, TOOK)
    return total, doubt


def readings(engines: Sequence[ServingEngine], template: str) -> Iterator[list[Reading]]:
    """The figures of each minute once there are enough readings, of each of some engines.

    Engines on one board are read at the same moments; half of its energy is said to be of either.
    """
    run_engines(engines)
    until = min(one.iterations[-1].end for one in engines)
    boards = {}
    for board in dict.fromkeys(board for one in engines for board in one.boards):
        curves = [one.curve for one in engines if board in one.boards]
        rest = at_rest(curves)
        steps, _ = counter_steps([*curves, rest], until, seed=5)
        boards[board] = steps, rest, len(curves)
    pages, accounts = [EmulatedPages(one) for one in engines], [EngineEnergy() for _ in engines]
    before = [read_page(one.at(BEGIN, template)) for one in pages]
    doubts = dict.fromkeys(boards, 0.0)
    for number in range(1, int(until - BEGIN) // READ_EVERY + 1):
        at = BEGIN + number * READ_EVERY
        after = [read_page(one.at(at, template)) for one in pages]
        done = [progress(*both) for both in zip(before, after, strict=True)]
        times = (at - READ_EVERY) * SECOND, at * SECOND
        found = {board: energy_of(steps, *times) for board, (steps, *_) in boards.items()}
        minute = []
        for i, (engine, account) in enumerate(zip(engines, accounts, strict=True)):
            (board,) = engine.boards
            energy, edge = found[board]
            _, rest, users = boards[board]
            beside = tuple(
                (str(j), done[j])
                for j, other in enumerate(engines)
                if j != i and other.boards == engine.boards
            )
            own, whole = Microjoules(round(energy / users)), Microjoules(round(energy))
            edges = doubts[board], edge
            account.add(EngineInterval(*times, own, edges, done[i], 0.0, beside, whole))
            if number * READ_EVERY >= LEARNED and number * READ_EVERY % WINDOW == 0:
                figures = account.figures()
                since = figures.start / SECOND or at - WINDOW
                first, last = pages[i].truth(since), pages[i].truth(at)
                exact = VLLM if template is FINISH else template
                counted = progress(
                    *(read_page(pages[i].at(time, exact)) for time in (since, at))
                ).tokens
                minute.append(
                    Reading(
                        figures,
                        last.input - first.input,
                        last.output - first.output,
                        (rest.at(at) - rest.at(since)) / users,
                        (int(counted["input"]), int(counted["output"])),
                    )
                )
        before, doubts = after, {board: edge for board, (_, edge) in found.items()}
        if minute:
            yield minute


def mean_batch(engine: ServingEngine) -> float:
    decode = sum(each.generated - len(each.prompts) for each in engine.iterations)
    return decode / sum(each.generated > 0 for each in engine.iterations)


def cell(found: Sequence[Estimate | None], truths: Sequence[float]) -> str:
    """The errors of a figure in so many minutes."""
    known = [(one, truth) for one, truth in zip(found, truths, strict=True) if one is not None]
    if not known:
        return "–"
    errors = [one.value / 1e6 / truth - 1 for one, truth in known]
    inside = [abs(one.value / 1e6 - truth) <= one.uncertainty / 1e6 for one, truth in known]
    stated = [one.uncertainty / one.value for one, _ in known]
    minutes = "" if len(known) == len(found) else f" ({len(known)}/{len(found)})"
    return (
        f"{statistics.fmean(errors):+.1%}/{quantile(errors, 0.95):.1%} "
        f"{statistics.fmean(inside):.0%}/{statistics.fmean(stated):.1%}{minutes}"
    )


def rows(engines: Sequence[ServingEngine], template: str, note: str = "") -> Iterator[str]:
    """The rows of some engines that run at the same time."""
    found = list(readings(engines, template))
    for i, engine in enumerate(engines):
        minutes = [minute[i] for minute in found]
        truths = {
            "all": [(e.input + e.output + e.waiting) / sum(e.tokens) for e in minutes],
            "output": [e.output / e.tokens[1] for e in minutes],
            "input": [e.input / e.tokens[0] for e in minutes],
        }
        cells = [cell([e.figures.tokens.get(way) for e in minutes], truths[way]) for way in truths]
        yield f"| {' | '.join((f'{mean_batch(engine):.1f}{note}', *cells))} |"


LOADS = ((4, 0.05, 700), (4, 0.28, 4000), (16, 0.9, 8000), (64, 2.2, 16000))
APART = LOADS[2:]  # with passes of their own for prompts
LATE = LOADS[::3]
PAIR = 3000, 0.4
REST = 30  # seconds before the first request
POWERS = 40.0, 250.0  # watts, instead of 110
HEAD = ("mean batch", "all", "output", "input")


def cases(part: int) -> Iterator[tuple[list[ServingEngine], str, str]]:
    """Engines that run at the same time, the template of their pages, and a note."""
    for slots, speed, count in LATE:
        yield single(slots, speed, count // part, rest=REST), FINISH, ", late counters"
    for slots, speed, count in LOADS:
        yield single(slots, speed, count // part, rest=REST), VLLM, ""
    for slots, speed, count in APART:
        yield single(slots, speed, count // part, mixed=False, rest=REST), SGLANG, ", SGLang"
    slots, speed, count = LOADS[-1]
    for power in POWERS:
        costs = replace(ModelCosts(), active_power=power)
        engines = single(slots, speed, count // part, rest=REST, costs=costs)
        yield engines, VLLM, f", {power:.0f} W"
    count, speed = PAIR
    yield pair(count // part, speed, ("gpu-0", "gpu-0"), rest=REST), VLLM, ", shared board"
    yield pair(count // part, speed, ("gpu-0", "gpu-1"), rest=REST), VLLM, ", own board"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a quarter of the requests")
    part = 4 if options.parse_args().quick else 1
    print(
        "Emulated: pages read each 5 s, from half a minute before the first request on. Bias/p95 of"
        " minutes, part within/mean of the stated range (minutes, if not all)."
        " Truth as above; `all`: the whole energy of the engine. Late counters move when a request"
        " ends; SGLang computes prompts apart. Active power is 110 W, else as named.\n"
    )
    print(f"| {' | '.join(HEAD)} |")
    print("|---" * len(HEAD) + "|")
    for engines, template, note in cases(part):
        for line in rows(engines, template, note):
            print(line, flush=True)


if __name__ == "__main__":
    main()
