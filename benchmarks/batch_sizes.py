"""The batch-size optimizer in a replay of published trainings, beside the rules of Zeus.

Everything is a replay: no GPU and no training runs. For three recurring jobs and two GPUs the
traces of Zeus (NSDI 2023) have the time and the GPU energy of an epoch for each batch size and
power limit, and the epochs to the target metric of repeated runs. Each run of the replay draws one
of these at random, and uses the power limit with the least cost for its batch size, as the tuner
finds it. The peer repeats the published rules: a posterior with the precision of each size's own
costs, in which a stopped run counts with its cost at the stop.

    .venv/bin/python -m benchmarks.batch_sizes [--seeds 40] [--runs 60]
"""

from __future__ import annotations

import argparse

from testbed.recurring_trainings import COMPUTED, jobs, zeus

from wattspan.recurring.jobs import (
    choose,
)

# ------------------------------------------------------------------------------------------ results


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=40)
    options.add_argument("--runs", type=int, default=60)
    options.add_argument("--all", action="store_true", help="every GPU, not only the V100")
    chosen = options.parse_args()
    print(
        f"Truth: recorded trainings; means of {chosen.seeds} replays of {chosen.runs} runs. Costs "
        "relative to the cheapest size's expected cost; energy saved by the last five runs against "
        "the default size at the highest limit. In brackets: Zeus's rules.\n"
    )
    print("| job | last five | all runs | without target | saved | goal |")
    print("|---|---|---|---|---|---|")
    for job in jobs():
        if job.gpu != "V100" and not chosen.all:
            continue
        own = job.replay(choose, chosen.seeds, chosen.runs)
        peer = job.replay(zeus, chosen.seeds, chosen.runs)
        print(
            f"| {job.name}, {job.gpu} | {own.last:.3f} ({peer.last:.3f}) "
            f"| {own.all:.3f} ({peer.all:.3f}) | {own.failures:.1f} ({peer.failures:.1f}) "
            f"| {own.saved:.0%} | {COMPUTED[job.gpu, job.name]:.0%} |"
        )


if __name__ == "__main__":
    main()
