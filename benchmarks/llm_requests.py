"""Energy of single requests to language models under continuous batching, against known truth.

Everything is emulated in virtual time: no process runs and no counter is read. Emulated engines
(testbed.continuous_batching) serve the first 2,000 requests of the Azure conversation
trace, with its arrivals, made slower or faster so that the batch is nearly full. The counter of a
board is updated every 100 ms in millijoules, and the time of an update is known to 2 ms (standard
deviation). Spans have the attributes of vLLM's and arrive every 5 s. The real division
(wattspan.inference.division) gets these only.

    .venv/bin/python -m benchmarks.llm_requests [--quick]
"""

from __future__ import annotations

import argparse
import statistics

from testbed import host_requests
from testbed.continuous_batching import ContinuousBatching, ModelCosts
from testbed.cpu_plants import PLANTS, CpuPlant
from testbed.host_requests import HostRequest
from testbed.serving_engines import (
    RequestResults,
    ServingEngine,
    arrivals,
    errors,
    pair,
    quantile,
    run,
    single,
)

from wattspan.inference.division import DivisionMethod
from wattspan.model import SECOND


def larger(size: float, slots: int, speed: float, count: int) -> list[ServingEngine]:
    """One engine with a larger model on one board."""
    batching = ContinuousBatching(ModelCosts().scaled(size), slots=slots, seed=9)
    requests = arrivals(count, speed, cached=0.1, seed=9)
    return [ServingEngine("32b", batching, ("gpu-0",), requests)]


def scenarios(count: int) -> dict[str, list[ServingEngine]]:
    return {
        "batch of 1": single(1, 0.075, count),
        "batch of up to 4": single(4, 0.28, count),
        "batch of up to 16": single(16, 0.9, 2 * count),
        "batch of up to 64": single(64, 2.2, 4 * count),
        "batch of up to 64, two boards": single(64, 3.0, 4 * count, boards=2),
        "model of 4 times the size": larger(4.0, 32, 0.55, 2 * count),
        "two models, two boards": pair(count, 0.9, ("gpu-0", "gpu-1")),
        "two models, one board": pair(count, 0.4, ("gpu-0", "gpu-0")),
    }


def row(name: str, result: RequestResults) -> str:
    learned = [o for o in result.outcomes if o.found.method is DivisionMethod.MODEL]
    own = errors(learned)
    within = [
        abs(o.found.energy - o.truth) <= o.found.uncertainty
        for o in learned
        if o.found.uncertainty is not None
    ]
    whole, equal = errors(learned, "whole"), errors(learned, "equal")
    sums = ", ".join(f"{each:+.1%}" for each in result.by_model.values())
    return (
        f"| {name} | {statistics.fmean(own):+.1%}, {quantile(own, 0.95):.1%} | "
        f"{statistics.fmean(within):.0%} | {sums} | {quantile(equal, 0.95):.0%}, "
        f"{quantile(whole, 0.95):.0%} |"
    )


def host_row(plant: CpuPlant, count: int) -> str:
    """The errors of the mean energy of the requests of a minute, and of the package's part.

    RuntimeError if energy is lost, or unknown.
    """
    result = host_requests.run(plant, count, seed=7)
    if result.remainder or not all(each.found.host.known for each in result.requests):
        raise RuntimeError(f"{plant.name}: {result.remainder} uJ are in no account")
    minutes: dict[int, list[HostRequest]] = {}
    for each in result.requests:
        minutes.setdefault(each.end // (60 * SECOND), []).append(each)
    whole, package = [], []
    for own in [*minutes.values()][1:-1] or minutes.values():  # whole minutes, if there are any
        cpu = sum(each.found.host.energy["cpu"] for each in own)
        board = sum(each.found.energy for each in own)
        true_cpu = sum(each.package for each in own)
        true = true_cpu + sum(each.board for each in own)
        whole.append((cpu + board) / true - 1)
        package.append(cpu / true_cpu - 1)
    return (
        f"| {plant.name} | {statistics.fmean(whole):+.1%}, {quantile(whole, 0.95):.1%} | "
        f"{quantile(package, 0.95):.1%} |"
    )


HOST_HEAD = ("package", "bias, p95", "package's part: p95")
HEAD = (
    "engine",
    "bias, p95",
    "within stated",
    "sum of each model",
    "equal shares, whole GPU: p95",
)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="400 requests instead of 2,000")
    count = 400 if options.parse_args().quick else 2_000
    print(
        f"Emulated: errors of {count} to {4 * count} requests above idle energy,"
        " once the model is learned. Truth: a request causes the energy of its tokens and contexts"
        " and an equal part of what an iteration's requests share.\n"
    )
    print(f"| {' | '.join(HEAD)} |")
    print("|---" * len(HEAD) + "|")
    for name, engines in scenarios(count).items():
        print(row(name, run(engines)), flush=True)
    print(
        "\nThe whole host without idle energy, on packages of `cpu_costs`: mean of the requests of"
        " each minute.\n"
    )
    print(f"| {' | '.join(HOST_HEAD)} |")
    print("|---" * len(HOST_HEAD) + "|")
    for plant in PLANTS:
        print(host_row(plant, 3 * count // 2), flush=True)


if __name__ == "__main__":
    main()
