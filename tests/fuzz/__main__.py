"""``make fuzz``: run targets guided by coverage, or reproduce failures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fuzz.campaign import ROOT, Outcome, counted, drive_all, reproducer, unavailable, why
from fuzz.registry import Target, targets


def main() -> int:
    arguments = _arguments()
    is_driving = not (arguments.list or arguments.input)
    if is_driving and (reason := unavailable()):
        print(f"Nothing is fuzzed: {reason}.", file=sys.stderr)
        return 0
    known = _counted_targets() if is_driving else targets()
    if unknown := sorted(set(arguments.target) - known.keys()):
        print(f"There is no target {unknown[0]!r}. Choose of: {', '.join(known)}.", file=sys.stderr)
        return 2
    chosen = [known[name] for name in arguments.target or known]
    if arguments.list:
        for one in chosen:
            print(f"{one.name:18} {one.whose}: {one.holds}")
        return 0
    if arguments.input:
        return _again(chosen, arguments.input)
    outcomes = drive_all(
        chosen,
        arguments.seconds,
        arguments.findings,
        jobs=arguments.jobs,
        seed=arguments.seed,
        keep=arguments.keep,
        done=_tell,
    )
    return 0 if all(outcome.is_clean for outcome in outcomes) else 1


def _counted_targets() -> dict[str, Target]:
    with counted():
        return targets()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--target", action="append", default=[], help="one target; all by default")
    parser.add_argument("--seconds", type=int, default=30, help="for each target (default 30)")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--seed", type=int, default=0, help="of chance; another each time by 0")
    parser.add_argument("--input", type=Path, help="run the target on this file only")
    parser.add_argument("--findings", type=Path, default=ROOT / "build/fuzz", help="for crashes")
    parser.add_argument("--keep", type=Path, help="keep what leads to new code in this folder")
    parser.add_argument("--list", action="store_true", help="what there is")
    return parser.parse_args()


def _again(chosen: list[Target], path: Path) -> int:
    """Run one input as it is: raised errors are findings."""
    if len(chosen) != 1:
        print("Name the --target of the input.", file=sys.stderr)
        return 2
    chosen[0].run(path.read_bytes())
    print(f"{chosen[0].name}: nothing is wrong with {path}.")
    return 0


def _tell(outcome: Outcome) -> None:
    print(
        f"{outcome.target.name:18} {outcome.executions:9,} executions {outcome.edges:6,} edges"
        f" {outcome.features:6,} features {outcome.peak:5} MiB {outcome.seconds:6.1f} s of CPU  "
        + ("clean" if outcome.is_clean else f"FAILED: {why(outcome)}"),
        flush=True,
    )
    for crash in outcome.crashes:
        print(f"    {reproducer(crash, outcome.target)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
