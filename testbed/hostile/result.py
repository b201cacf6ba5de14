"""Result of an attack: the finding and the reasons for which it was not withstood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from testbed.hostile.judge import MEGABYTE, Finding, worst_service


@dataclass(frozen=True)
class Judged:
    """A finding and its defect."""

    finding: Finding
    wrong: Sequence[str]

    def __str__(self) -> str:
        one = self.finding
        _, worst = worst_service(one.others)
        requests = sum(found.requests for found in one.others.values())
        lost = sum(found.refused + found.unanswered for found in one.others.values())
        longest = max((found.worst for found in one.others.values()), default=0.0)
        result = f"**failed**: {'; '.join(self.wrong)}" if self.wrong else "withstood"
        cells = (
            one.attack,
            "yes" if one.wedged else "no",
            "yes" if one.killed else "no",
            f"{one.peak / MEGABYTE:.0f} MB" if one.peak else "unknown",
            f"{one.growth:+.0f} MB" if one.after else "unknown",
            f"{_seconds(worst.p99)}, {_seconds(longest)}",
            f"{lost} of {requests:,}",
            f"{result}{f' ({one.note})' if one.note else ''}",
        )
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "never"
