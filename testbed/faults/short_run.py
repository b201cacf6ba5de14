"""Queries of an agent that went through a fault."""

from __future__ import annotations

from testbed.faults.schedule import Fault, undergo
from testbed.faults.stage import Stage


def stands(stage: Stage, fault: Fault, *, restart: bool = False) -> None:
    """Go through the fault in short, and assert that no figure and no claim was wrong.

    Delays decide no test, because others may have the processor: the benchmark judges them.
    """
    outcome = undergo(stage, fault, short=True, restart=restart)
    found = [*outcome.wrong[:8], outcome.note]
    assert not outcome.broken, f"{fault.name}: {found}. The agent said: {stage.lives}"
    print(*outcome.late, sep="\n")


def of(fault: Fault) -> str:
    """Name of the fault as a test case."""
    return fault.name
