"""Searches of clocks for pipelines, each in a process of its own.

A search computes for seconds. In a thread of the agent it would delay each reading of a counter by
the interpreter's switch interval.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

from wattspan.util.process import module_command

if TYPE_CHECKING:
    from wattspan.tuning.pipeline.plan import ClockPlan
    from wattspan.tuning.pipeline.session_state import PlanTask

TIMEOUT = 120.0
"""Seconds after which a search is ended; the largest pipelines take some ten of them."""

_NICENESS = 10


class PlanSearchError(Exception):
    """A search has failed; the message names the cause."""


def search_plan(task: PlanTask) -> Future[ClockPlan | None]:
    """Begin a search; the future has its plan, or a PlanSearchError."""
    future: Future[ClockPlan | None] = Future()
    threading.Thread(target=_answer, args=(task, future), name="wattspan-plan", daemon=True).start()
    return future


def _answer(task: PlanTask, future: Future[ClockPlan | None]) -> None:
    try:
        future.set_result(_searched(task))
    except Exception as error:  # noqa: BLE001 - it is raised where the result is used
        future.set_exception(error)


def _searched(task: PlanTask) -> ClockPlan | None:
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            module_command("wattspan.service.plan_processes"),
            input=pickle.dumps(task),
            capture_output=True,
            cwd="/",
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PlanSearchError(f"the search of a plan took longer than {TIMEOUT:g} s") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise PlanSearchError(f"the search of a plan ended with code {done.returncode}: {last}")
    plan: ClockPlan | None = pickle.loads(done.stdout)  # noqa: S301 - of our own process
    return plan


def main() -> None:
    """Read a task from the standard input, and write its plan."""
    with contextlib.suppress(OSError):  # the unit's sandbox forbids it
        os.nice(_NICENESS)
    task: PlanTask = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own parent
    pickle.dump(task.solved(), sys.stdout.buffer)


if __name__ == "__main__":
    main()
