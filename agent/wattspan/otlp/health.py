"""How long to leave a collector alone that fails.

How the collector is doing, for the operator: said when it changes, not at every attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from wattspan.model import SECOND, Failure, SourceHealth, Trouble
from wattspan.otlp.destination import Destination
from wattspan.otlp.transport import ExportResult, ExportStatus
from wattspan.ports import Clock

MAX_BACKOFF = 8 * SECOND
"""So that one which works again is found to within ten seconds."""


class RetryBackoff:
    """Doubling delays with jitter, so that many agents do not come back at one moment.

    ``chance`` yields numbers from 0 up to 1.
    """

    def __init__(
        self, chance: Callable[[], float], *, first: int = SECOND, longest: int = MAX_BACKOFF
    ) -> None:
        self._chance = chance
        self._first, self._longest = first, longest
        self._next = first

    def succeeded(self) -> None:
        self._next = self._first

    def failed(self, asked: int | None = None) -> int:
        """The delay after one more failure, in nanoseconds.

        It is never shorter than what was ``asked`` for. A collector that names a delay knows
        better than we do when to come again, so the delay does not grow with each such answer.
        """
        if asked is not None:
            return max(asked, self._jittered(self._first))
        delay = self._jittered(self._next)
        self._next = min(2 * self._next, self._longest)
        return delay

    def _jittered(self, delay: int) -> int:
        """Somewhere in the upper half of ``delay``."""
        return delay - round(delay / 2 * self._chance())


class DestinationHealth:
    """Remembers the last answers. Written by one thread, ``health`` is safe from any."""

    def __init__(self, destination: Destination, clock: Clock, log: Callable[[str], None]) -> None:
        self._destination, self._signal = destination, destination.signal
        self._clock = clock
        self._log = log
        self._failure: Failure | None = None
        self._away_since: int | None = None
        self._attempts = self._failed = 0
        self._said: dict[ExportStatus, int] = {}

    def health(self) -> SourceHealth:
        failure = self._failure
        return SourceHealth(
            self._signal.name,
            up=failure is None,
            reads=self._attempts,
            failed=self._failed,
            failures=() if failure is None else (failure,),
        )

    def failed(self, answer: ExportResult) -> None:
        """It did not take a request, and will be asked again."""
        remedy = f"{answer.remedy} {self._signal.patience}".strip()
        self._note(answer, Trouble.RETRY, remedy)
        if self._away_since is None:
            self._away_since = self._clock.monotonic()
            self._say(answer.verdict, str(self._failure))

    def answered(self, answer: ExportResult, count: int) -> None:
        """It has dealt with a request of so many things for good: taken or refused it."""
        things = self._signal.things
        if answer.verdict is not ExportStatus.TAKEN:
            self._note(
                answer,
                Trouble.MALFORMED,
                f"{answer.remedy} The {self._signal.things} are dropped.".strip(),
            )
            self._say(answer.verdict, f"{self._failure} ({count} of them now.)")
            self._away_since = None
            return
        self._attempts += 1
        self._failure = None
        if self._away_since is not None:
            away = (self._clock.monotonic() - self._away_since) // SECOND
            self._away_since = None
            if self._said.pop(ExportStatus.AGAIN, None) is not None:
                self._log(f"{self._destination} takes {things} again, after {away} s.")
        if answer.why:
            remedy = f" {answer.remedy}" if answer.remedy else ""
            self._say(
                answer.verdict, f"{self._destination} takes {things}, but {answer.why}.{remedy}"
            )

    def ended(self, lost: int) -> None:
        """The agent ends, and so much still waited for it in memory."""
        if lost:
            self._log(
                f"{lost} {self._signal.things} still waited for {self._destination} at the end, "
                f"and are dropped; {self._signal.loss}"
            )

    def _note(self, answer: ExportResult, trouble: Trouble, remedy: str) -> None:
        self._attempts += 1
        self._failed += 1
        thing = f"{self._signal.things} to {self._destination}"
        self._failure = Failure(
            self._signal.name, thing, trouble, answer.why, remedy, verb=self._signal.verb
        )

    def _say(self, kind: ExportStatus, sentence: str) -> None:
        now = self._clock.monotonic()
        last = self._said.get(kind)
        if last is None or now - last >= self._signal.quiet:
            self._said[kind] = now
            self._log(sentence)
