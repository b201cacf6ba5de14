"""Jobs whose boards draw less than the lowest permitted cap: the tuner lowers their clocks instead.

Each run is the whole tuner on the simulated host of the tests, with
``knobs = ["gpu_power", "gpu_clock"]`` and the other settings at their defaults. The score is the
truth of the simulation over the whole run, learning included, relative to the same steps at the
highest clock. The oracle is the fixed clock with the least energy within the budget.

Two boards, whose caps go from 700 W to 420 W: an assumption, so that no cap binds. A change of the
clock acts at once.

- ``a40-gpt3``: time and energy of a step at each clock are measured (Perseus, A40).
- ``decode``: the law of the emulated inference server, for a batch that decodes. Nothing of it is
  measured.

    .venv/bin/python -m benchmarks.tuner.clock_knob --runs 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from testbed.machine import describe
from testbed.tuner.clock_knob import BUDGET, NOISES, Outcome, clock_curves, oracle, run
from testbed.tuner.curves import Curve
from testbed.tuner.stats import clopper_pearson, mean


def row(curve: Curve, found: Sequence[Outcome]) -> str:
    """The runs of one job as a line of the table."""
    best, at = oracle(curve)
    over = sum(one.slowdown > BUDGET for one in found)
    held = sorted(one.committed for one in found if one.committed is not None)
    clocks = sorted(one.clock for one in found)
    return (
        f"| {curve.name}, CV {found[0].noise:.0%} | {curve.workload} | {curve.draw:.0f} W "
        f"| {over}/{len(found)} | {max(one.slowdown for one in found):.2%} "
        f"| {mean([one.saving for one in found]):.1%} | {best:.1%} "
        f"| {mean([one.saving for one in found]) / best:.0%} "
        f"| {clocks[0]:.0f}-{clocks[-1]:.0f} ({at:.0f}) of {curve.original:.0f} MHz "
        f"| {f'{held[len(held) // 2]:.0f} s' if held else 'never'} "
        f"| {sum(one.capped for one in found)} |"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=5, help="of each job")
    parser.add_argument("--hours", type=float, default=1.0, help="simulated time of each run")
    options = parser.parse_args(words)
    print(f"{describe()}; simulated, {options.hours:g} hours a run.\n")
    print(
        "| job | curve | draw | over the budget | largest slowdown | saving | oracle | share "
        "| last clocks (oracle) | held after, median | runs with a power cap |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    everything: list[Outcome] = []
    for curve in clock_curves():
        for noise in NOISES:
            found = [
                run(curve, noise, seed, 3600 * options.hours) for seed in range(1, options.runs + 1)
            ]
            everything += found
            print(row(curve, found), flush=True)
    over = sum(one.slowdown > BUDGET for one in everything)
    print(
        f"\nOver the budget of {BUDGET:.0%}: {over} of {len(everything)} runs "
        f"(95 % bound {clopper_pearson(over, len(everything), one_sided=True)[1]:.0%})."
    )


if __name__ == "__main__":
    main()
