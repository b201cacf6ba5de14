"""An agent and its capper, stopped in the very moment in which a cap is in force.

A level that is tried is in force for part of a second only. The test's action on the lock holders
must not depend on timing.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from testbed.tuned_stack import Tuned
from testbed.waiting import eventually


def still_while_capped(agent: Tuned) -> int:
    """Stop the agent and its capper while a cap is in force; the capper's pid.

    The cap remains in force until ``go_on`` continues a holder.
    """

    def stopped() -> int | None:
        agent.until(agent.host.capped, "a cap is in force")
        capper = agent.capper
        if capper is None:
            return None
        pids = (agent.process.pid, capper)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: all(_stands_still(pid) for pid in pids), "both stand still")
        if agent.host.capped():
            return capper
        go_on(*pids)  # the cap was restored meanwhile
        return None

    capper = agent.until(stopped, "they stand still while a cap is in force", within=60)
    assert capper is not None
    return capper


def go_on(*pids: int) -> None:
    """Let them."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def _stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
