"""A ceiling that somebody else writes into a file: a scheduler, a fleet's power manager, a person.

TOML: ``watts = 1200``, and if it is not to last for ever ``ttl = "1h"``, counted from when the
file was last written; ``why = "grid event"`` is shown to whoever asks. ``watts = 0`` lifts it.

The file's owner must be root, the capper's own user or a user whom the configuration names, and
nobody else may be able to write it: a file of another owner is refused.

A writer that is lost leaves its ceiling in force: a file that vanishes or says nonsense changes
nothing, until the last ceiling's time is up.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from wattspan.model.settings import Duration
from wattspan.ports import Clock
from wattspan.util.files import read_regular
from wattspan.util.text import printable

MAX_FILE_BYTES: Final = 4096
"""Bytes. It holds three keys; nothing of a larger file is read."""

_KEYS: Final = ("watts", "ttl", "why")
_MAX_WATTS: Final = 1_000_000
_MAX_REASON_LENGTH: Final = 200


@dataclass(frozen=True, slots=True)
class CeilingValue:
    """What a file says: ``limit`` in milliwatts, until the monotonic time ``expires``.

    ``uid`` is of the file's owner, None if it is not known any more.
    """

    limit: int
    why: str = ""
    expires: int | None = None
    uid: int | None = field(default=None, compare=False)


class CeilingFile:
    """The newest ceiling of one file. Belongs to one thread.

    ``trouble`` is one sentence while something is wrong with the file; "" otherwise.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        last: CeilingValue | None = None,
        *,
        owners: frozenset[int] = frozenset(),
    ) -> None:
        """``last`` is in force until the file says otherwise, as before a restart.

        ``owners`` are the users who may own the file beside root and the capper's own.
        """
        self.owners = owners
        self._path = path
        self._clock = clock
        self._last = last
        self._seen: tuple[int, ...] | None = None  # which version of the file was taken in
        self.trouble = ""

    def poll(self) -> CeilingValue | None:
        """Look at the file, and tell what is in force now; None for no ceiling."""
        try:
            self._look()
        except (OSError, ValueError) as error:
            self.trouble = self._sentence(error)
        last, now = self._last, self._clock.monotonic()
        return None if last is None or _is_expired(last, now) else last

    def _look(self) -> None:
        content, status = read_regular(self._path, MAX_FILE_BYTES)
        self._check_owner(status)
        version = (status.st_ino, status.st_size, status.st_mtime_ns)
        if version == self._seen:
            self.trouble = ""
            return
        if not content.endswith(b"\n"):  # "watts = 12" may be on its way to be 1200
            raise ValueError("its last line does not end, so it may be half written")
        self._last = self._understood(content, status)
        self._seen = version
        self.trouble = ""

    def _check_owner(self, status: os.stat_result) -> None:
        """ValueError if somebody may write the file who may not set a ceiling."""
        if status.st_uid not in self.owners | {0, os.geteuid()}:
            raise ValueError(
                f"user {status.st_uid} owns it, whom [caps] ceiling_users does not name"
            )
        if status.st_mode & 0o022:
            raise ValueError("its group or everybody may write it (chmod go-w)")

    def _understood(self, content: bytes, status: os.stat_result) -> CeilingValue | None:
        """What the file says; ValueError says what is wrong with it."""
        try:
            table = tomllib.loads(content.decode())
        except UnicodeDecodeError:
            raise ValueError("it is not UTF-8") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        unknown = sorted(table.keys() - set(_KEYS))
        if unknown:
            raise ValueError(f"{unknown[0][:40]!r} is none of its keys: {', '.join(_KEYS)}")
        watts = _watts(table)
        why = table.get("why", "")
        if not isinstance(why, str):
            raise ValueError('why: write a text, such as "grid event"')  # noqa: TRY004
        limit = round(watts * 1000)
        if not limit:
            return None
        expires = self._expires(_ttl(table), status.st_mtime_ns)
        return CeilingValue(limit, _printable_line(why), expires, status.st_uid)

    def _expires(self, ttl: int | None, written: int) -> int | None:
        """When it is over, on the clock that nobody sets; a file from the future is as of now."""
        if ttl is None:
            return None
        now = self._clock.now()
        return now.mono + ttl - max(0, now.wall - written)

    def _sentence(self, error: OSError | ValueError) -> str:
        cause = (error.strerror or "").lower() if isinstance(error, OSError) else str(error)
        last, now = self._last, self._clock.monotonic()
        standing = (
            "No ceiling of it is in force"
            if last is None or _is_expired(last, now)
            else f"Its last ceiling of {last.limit / 1000:g} W stays in force"
        )
        return f"Cannot take a ceiling from {self._path}: {cause}. {standing}; mend the file."


def _watts(table: dict[str, Any]) -> float:
    watts = table.get("watts")
    if isinstance(watts, bool) or not isinstance(watts, int | float) or watts != watts:
        raise ValueError("watts: write a number, such as 1200")
    if not 0 <= watts <= _MAX_WATTS:
        raise ValueError(f"watts: write 0 to {_MAX_WATTS:,}; 0 lifts the ceiling")
    return watts


def _ttl(table: dict[str, Any]) -> int | None:
    ttl = table.get("ttl")
    if ttl is None:
        return None
    if not isinstance(ttl, str):
        raise ValueError(f"ttl: write a {Duration.kind}")  # noqa: TRY004
    try:
        return int(Duration.parse(ttl))
    except ValueError:
        raise ValueError(f"ttl: write a {Duration.kind}") from None


def _printable_line(text: str) -> str:
    """Fit to be shown to a person, and bounded."""
    return printable(text, " ")[:_MAX_REASON_LENGTH]


def _is_expired(ceiling: CeilingValue, now: int) -> bool:
    return ceiling.expires is not None and ceiling.expires <= now
