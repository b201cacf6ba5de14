"""Queries of an agent that went through a fault."""

from __future__ import annotations

from testbed.faults.schedule import Fault, undergo
from testbed.faults.stage import Stage
from testbed.repeated import holds_once


def stands(stage: Stage, fault: Fault, *, restart: bool = False) -> None:
    """Go through the fault in short, and assert that nothing was wrong with it.

    Delays are retried: others may have had the processor.
    """

    def late() -> list[str]:
        outcome = undergo(stage, fault, short=True, restart=restart)
        found = [*outcome.wrong[:8], outcome.note]
        assert not outcome.broken, f"{fault.name}: {found}. The agent said: {stage.lives}"
        return [f"{fault.name}: {sentence}" for sentence in outcome.late]

    holds_once(late)


def of(fault: Fault) -> str:
    """Name of the fault as a test case."""
    return fault.name
