"""Joules per token of serving engines from their own counters, against known truth.

Everything is emulated in virtual time, as by benchmarks/llm_requests.py. The page of an engine with
the names of vLLM, whose counters move with each iteration, and with those of TensorRT-LLM, which
move when a request finishes, is read every 5 s. Each reading takes 4 ms. The counter of a board is
updated every 100 ms. The real reader of pages (wattspan.inference.engine_metrics) and the real
arithmetic (wattspan.inference.engine_energy) get these only.

    .venv/bin/python -m benchmarks.engine_metrics [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from testbed.engine_pages import FINISH, VLLM, EmulatedPages
from testbed.serving_engines import (
    BEGIN,
    ServingEngine,
    at_rest,
    counter_steps,
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
    true_tokens: tuple[int, int]


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


def readings(engine: ServingEngine, template: str) -> Iterator[Reading]:
    """The figures of each minute once there are enough readings."""
    run_engines([engine])
    rest = at_rest([engine.curve])
    until = engine.iterations[-1].end
    steps, _ = counter_steps([engine.curve, rest], until, seed=5)
    pages, account = EmulatedPages(engine), EngineEnergy()
    before, doubt = read_page(pages.at(BEGIN, template)), 0.0
    count = int(until - BEGIN) // READ_EVERY
    for number in range(1, count + 1):
        at = BEGIN + number * READ_EVERY
        after = read_page(pages.at(at, template))
        energy, edge = energy_of(steps, (at - READ_EVERY) * SECOND, at * SECOND)
        done = progress(before, after)
        assert done is not None
        account.add(
            EngineInterval(
                (at - READ_EVERY) * SECOND,
                at * SECOND,
                Microjoules(round(energy)),
                (doubt, edge),
                done,
            )
        )
        before, doubt = after, edge
        if number * READ_EVERY >= LEARNED and number * READ_EVERY % WINDOW == 0:
            figures = account.figures()
            since = figures.start / SECOND or at - WINDOW
            first, last = pages.truth(since), pages.truth(at)
            yield Reading(
                figures,
                last.input - first.input,
                last.output - first.output,
                rest.at(at) - rest.at(since),
                tuple(
                    int(read_page(pages.at(at)).sum(one) - read_page(pages.at(since)).sum(one))
                    for one in ("input", "output")
                ),
                (last.computed - first.computed, last.generated - first.generated),
            )


def mean_batch(engine: ServingEngine) -> float:
    decode = sum(each.generated - len(each.prompts) for each in engine.iterations)
    return decode / sum(each.generated > 0 for each in engine.iterations)


def row(name: str, found: Sequence[Estimate | None], truths: Sequence[float]) -> str:
    known = [(one, truth) for one, truth in zip(found, truths, strict=True) if one is not None]
    if not known:
        return f"| {name} | 0 of {len(found)} | – | – | – |"
    errors = [one.value / 1e6 / truth - 1 for one, truth in known]
    inside = [abs(one.value / 1e6 - truth) <= one.uncertainty / 1e6 for one, truth in known]
    stated = [one.uncertainty / one.value for one, _ in known]
    return (
        f"| {name} | {len(known)} of {len(found)} | {statistics.fmean(errors):+.1%}, "
        f"{quantile(errors, 0.95):.1%} | {statistics.fmean(inside):.0%} | "
        f"{statistics.fmean(stated):.1%} |"
    )


LOADS = ((4, 0.05, 700), (4, 0.28, 4000), (16, 0.9, 8000), (64, 2.2, 16000))
HEAD = ("mean batch: figure", "minutes with it", "bias, p95", "within stated", "stated, mean")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="a quarter of the requests")
    part = 4 if options.parse_args().quick else 1
    print(
        "Emulated: pages read every 5 s, windows of a minute. Truth as above; for `all`, the whole"
        " energy of the engine. Late counters move when a request ends.\n"
    )
    print(f"| {' | '.join(HEAD)} |")
    print("|---" * len(HEAD) + "|")
    for slots, speed, count in LOADS:
        engine = single(slots, speed, count // part)[0]
        found = list(readings(engine, FINISH))
        late = f"{mean_batch(engine):.1f}: all, late counters"
        print(
            row(
                late,
                [each.figures.tokens.get("all") for each in found],
                [(e.input + e.output + e.waiting) / sum(e.tokens) for e in found],
            )
        )
        engine = single(slots, speed, count // part)[0]
        found = list(readings(engine, VLLM))
        batch = f"{mean_batch(engine):.1f}"
        print(
            row(
                f"{batch}: all",
                [each.figures.tokens.get("all") for each in found],
                [(e.input + e.output + e.waiting) / sum(e.tokens) for e in found],
            )
        )
        for at, way in enumerate(("output", "input")):
            print(
                row(
                    f"{batch}: {way}",
                    [each.figures.tokens.get(way) for each in found],
                    [getattr(each, way) / each.tokens[1 - at] for each in found],
                )
            )


if __name__ == "__main__":
    main()
