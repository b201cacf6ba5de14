"""What processes can be seen with: every means, and what follows where it is missing."""

from __future__ import annotations

from wattspan.cli.diagnosis import Finding, Mark, Section
from wattspan.clock import SystemClock
from wattspan.config import Config
from wattspan.ports import SourceError
from wattspan.processes import open_processes


def examine_processes(config: Config, clock: SystemClock) -> Section:
    """Open what the agent would open, ask what it can, and close it."""
    try:
        source = open_processes(clock, events=config.processes.events).usage
    except SourceError as error:
        return Section("Processes", (Finding(Mark.FAIL, "process events", str(error)),))
    try:
        return Section(
            "Processes",
            tuple(
                Finding(
                    Mark.OK if capability.active else Mark.WARN,
                    capability.name,
                    capability.detail,
                    "" if capability.active else capability.remedy,
                )
                for capability in source.capabilities()
            ),
        )
    finally:
        source.close()
