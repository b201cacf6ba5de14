"""Answers about tuning: how each job stands, and what was decided when.

Job names and sentences are told to everybody who may open the socket, as what devices spend is:
they say what the host does with its knobs, and nothing of what a process computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from wattspan.model import Instant, RecordedDecision, TuningAccounts
from wattspan.query.problem import bad
from wattspan.query.question import known_only, moment_of, shown
from wattspan.tuning.serialization import JsonObject, accounts_to_json, recorded_decision_to_json

TuningView = Callable[[], TuningAccounts]
"""Returns the newest accounts; calling it changes nothing."""

MOST = 10_000
USUAL = 100


class HistoryView(Protocol):
    """Tells decisions, oldest first; see :meth:`wattspan.storage.decisions.DecisionLog.recent`."""

    def __call__(
        self, job: str = "", limit: int = USUAL, since: int | None = None
    ) -> Sequence[RecordedDecision]: ...


class HistoryQuestion(NamedTuple):
    """Which decisions: of which job ("": every one), how many, and since when (Unix ns)."""

    job: str
    limit: int
    since: int | None


def history_question(query: Mapping[str, str], now: Instant) -> HistoryQuestion:
    """The question that ``query`` asks, or a ProblemError for the first thing wrong with it."""
    known_only(query, ("job", "limit", "since"))
    since = None
    if "since" in query:
        since = now.wall - (now.mono - moment_of("since", query["since"], now))
    return HistoryQuestion(query.get("job", ""), _limit(query.get("limit", str(USUAL))), since)


def tuning(view: TuningView | None) -> JsonObject:
    """How every job stands. Where nothing tunes, the mode is ``off`` and there are no jobs."""
    return accounts_to_json(TuningAccounts() if view is None else view())


def history(view: HistoryView | None, question: HistoryQuestion) -> JsonObject:
    """The decisions asked for, oldest first."""
    told = () if view is None else view(question.job, question.limit, question.since)
    return {"decisions": [recorded_decision_to_json(decided) for decided in told]}


def _limit(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= 9 and 0 < int(text) <= MOST:
        return int(text)
    raise bad(f"limit={shown(text)}", f"that is no whole number from 1 to {MOST}", "Write one.")
