"""What was certified before: where a job that is known starts from.

A remembered setting is a guess that is worth trying first, never a promise: it is certified
anew each time. One that failed twice in a row is forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from wattspan.model import Knob
from wattspan.tuning.digest import digest
from wattspan.tuning.values import Fingerprint, Remembered

__all__ = ["Book", "Entry", "Key", "digest", "from_facts", "to_facts"]

VERSION = 1
MOST = 256
"""Entries; of more, the one that was not used for longest goes."""

FAILURES = 2
"""An entry that failed so often, with no success between, is forgotten."""

_LONGEST = 512  # characters of a name that is read back
_DEVICES = 1024  # levels of one entry that are read back


class Key(NamedTuple):
    """A job on its devices, and what is turned."""

    fingerprint: Fingerprint
    knob: Knob


class Entry(NamedTuple):
    """What was certified, and how often it has failed since."""

    remembered: Remembered
    failures: int = 0


_EMPTY: Mapping[Key, Entry] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Book:
    """What is remembered, least recently used first."""

    entries: Mapping[Key, Entry] = field(default_factory=lambda: _EMPTY)

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> Remembered | None:
        """What to try first; None for what is not known."""
        entry = self.entries.get(Key(fingerprint, knob))
        return entry.remembered if entry is not None else None

    def used(self, fingerprint: Fingerprint, knob: Knob) -> Book:
        """After an entry was tried: it is the last to be let go."""
        key = Key(fingerprint, knob)
        entry = self.entries.get(key)
        return self if entry is None else self._with(key, entry)

    def certified(self, fingerprint: Fingerprint, remembered: Remembered) -> Book:
        """After a setting was certified: it takes the place of what was remembered."""
        return self._with(Key(fingerprint, remembered.knob), Entry(remembered))

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> Book:
        """After a remembered setting could not be certified, or had to be released."""
        key = Key(fingerprint, knob)
        entry = self.entries.get(key)
        if entry is None:
            return self
        if entry.failures + 1 < FAILURES:
            return self._with(key, entry._replace(failures=entry.failures + 1))
        return Book(MappingProxyType({k: e for k, e in self.entries.items() if k != key}))

    def _with(self, key: Key, entry: Entry) -> Book:
        entries = {k: e for k, e in self.entries.items() if k != key}
        entries[key] = entry
        for oldest in list(entries)[: max(0, len(entries) - MOST)]:
            del entries[oldest]
        return Book(MappingProxyType(entries))


# ------------------------------------------------------------------------------------- as JSON


def to_facts(book: Book) -> dict[str, Any]:
    """The book as plain values for JSON."""
    return {
        "version": VERSION,
        "entries": [
            {
                "fingerprint": asdict(key.fingerprint),
                "knob": key.knob.value,
                "failures": entry.failures,
                "setting": _setting_facts(entry.remembered),
            }
            for key, entry in book.entries.items()
        ],
    }


def _setting_facts(remembered: Remembered) -> dict[str, Any]:
    return {
        "level": remembered.level,
        "original": remembered.original,
        "slowdown": remembered.slowdown,
        "saving": remembered.saving,
        "pairs": remembered.pairs,
        "noise": remembered.noise,
        "levels": dict(remembered.levels),
    }


def from_facts(facts: object) -> Book:
    """The book that :func:`to_facts` told. An entry that does not read is left out.

    A book of another version is an empty one: what is remembered can be learned anew.
    """
    book = Book()
    if not isinstance(facts, Mapping) or facts.get("version") != VERSION:
        return book
    entries = facts.get("entries")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return book
    read: dict[Key, Entry] = {}
    for one in entries:
        try:
            key, entry = _entry_of(one)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
        read.pop(key, None)
        read[key] = entry
    return Book(MappingProxyType(dict(list(read.items())[-MOST:])))


def _entry_of(facts: Any) -> tuple[Key, Entry]:
    """Raises one of several errors for anything that :func:`to_facts` does not tell."""
    job, setting = facts["fingerprint"], facts["setting"]
    fingerprint = Fingerprint(
        command=_text(job["command"]),
        model=_text(job["model"]),
        driver=_text(job["driver"]),
        devices=_count(job["devices"]),
        service=_text(job["service"]),
        span=_text(job["span"]),
    )
    levels = {_text(device): _count(level) for device, level in setting["levels"].items()}
    remembered = Remembered(
        knob=Knob(facts["knob"]),
        level=_count(setting["level"]),
        original=_count(setting["original"]),
        slowdown=_figure(setting["slowdown"]),
        saving=_figure(setting["saving"]),
        pairs=_count(setting["pairs"]),
        noise=_figure(setting["noise"]),
        levels=MappingProxyType(levels),
    )
    highest = max(remembered.level, *levels.values()) if levels else remembered.level
    failures = _count(facts["failures"])
    if highest > remembered.original or len(levels) > _DEVICES or failures >= FAILURES:
        raise ValueError("no setting that was ever certified")
    return Key(fingerprint, remembered.knob), Entry(remembered, failures)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise TypeError("not a name")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise TypeError("not a count")
    return value


def _figure(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e9:
        raise TypeError("not a figure")
    return float(value)
