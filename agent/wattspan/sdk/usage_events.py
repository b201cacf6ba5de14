"""Server-sent events of a streamed response: the last event with ``usage`` is known at its end."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

_EVENT = b"data:"
_END = b"[DONE]"
_NEWLINES = (b"\n", b"\r")


class Part(NamedTuple):
    """Bytes to send, in this order.

    ``usage`` is the line of the last event with token counts, and ``since`` when it was complete.
    """

    before: bytes
    usage: bytes | None = None
    after: bytes = b""
    since: float = 0.0


class UsageEvents:
    """Passes events on, and holds each event with ``usage`` until it is known to be the last.

    Engines with continuous usage have it in every event. An event is not the last one if an event
    with ``usage`` follows, or one with more generated text. Unfinished lines are held as well.
    ``most`` limits the held bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: list[bytes] = []  # an event with usage, and the lines after it
        self._partial = b""
        self._passing = False  # the rest of a line whose begin was released
        self._over = False
        self._since = 0.0

    @property
    def held_since(self) -> float | None:
        """When the held event was complete, or an unfinished line began; None without any."""
        return self._since if self._held or self._partial else None

    def feed(self, body: bytes, now: float, *, last: bool = False) -> Part:
        """Add a part of the stream that was received at ``now``; ``last`` ends it."""
        if self._over:
            return Part(body)
        fresh = not self._partial
        lines = (self._partial + body).splitlines(keepends=True)
        unfinished = bool(lines) and not last and not lines[-1].endswith(_NEWLINES)
        self._partial = lines.pop() if unfinished else b""
        before: list[bytes] = []
        for number, line in enumerate(lines):
            if self._held and event_data(line) == _END:
                rest = b"".join((*self._held[1:], *lines[number:], self._partial))
                return self._finish(before, rest)
            self._add(line, now, before)
        if last and self._held:
            return self._finish(before, b"".join(self._held[1:]))
        if self._partial and not self._held and (fresh or lines):
            self._since = now
        if self._passing or sum(map(len, self._held)) + len(self._partial) > self._most:
            before.append(self.release())
        return Part(b"".join(before))

    def release(self) -> bytes:
        """Remove and return all held bytes, without waiting for more."""
        found = b"".join((*self._held, self._partial))
        if self._partial:
            self._passing = True
        self._held, self._partial = [], b""
        return found

    def _add(self, line: bytes, now: float, before: list[bytes]) -> None:
        data = b"" if self._passing else event_data(line)
        self._passing = False
        document = _document(data) if data and (self._held or b'"usage"' in data) else None
        counted = has_usage(document)
        if counted or _continues(document):
            before += self._held
            self._held = []
        if counted:
            self._held, self._since = [line], now
        else:
            (self._held or before).append(line)

    def _finish(self, before: list[bytes], after: bytes) -> Part:
        usage = self._held[0]
        self._held, self._partial, self._over = [], b"", True
        return Part(b"".join(before), usage, after, self._since)


def has_usage(document: Any) -> bool:
    """True for a document with token counts."""
    return isinstance(document, dict) and isinstance(document.get("usage"), dict)


def event_data(line: bytes) -> bytes:
    """The data in a line of an event; nothing in other lines."""
    return line.removeprefix(_EVENT).strip() if line.startswith(_EVENT) else b""


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _continues(document: Any) -> bool:
    """True for an event with a part of the generated text after which more follows."""
    choices = document.get("choices") if isinstance(document, dict) else None
    return (
        isinstance(choices, list)
        and bool(choices)
        and not any(isinstance(each, dict) and each.get("finish_reason") for each in choices)
    )
