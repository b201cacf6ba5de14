"""A short name for what a job runs, the same whenever the same job is run again.

Left out is what differs from one run to the next and has nothing to do with speed: the place of
the interpreter, ports, process ids, ranks, seeds, names of runs and where they write, moments,
UUIDs, and the random parts of temporary paths. All else counts, in its order: a batch size, a
model, a precision or a data set makes another job. When in doubt a part counts: an unknown job
costs a search, a wrong memory costs a try that fails.

What was certified before: where a job that is known starts from.

A remembered setting is a guess that is worth trying first, never a promise: it is certified
anew each time. One that failed twice in a row is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2s
from types import MappingProxyType
from typing import Any, NamedTuple

from wattspan.model import Knob
from wattspan.tuning.decisions.values import CertifiedLevels, Fingerprint

_DIGEST_BYTES = 8  # bytes

_WILDCARD = "*"

_VOLATILE = re.compile(
    r"""(?: .* [-_.] )?
    (?: port | pid | seed | uuid | logdir
      | (?: local | node | global | machine | group | role ) [-_]? rank
      | (?: run | job | session | trial | rdzv | trace ) [-_]? (?: id | name )
      | (?: log | output | out | save | tensorboard | results? ) [-_]?
        (?: dir(?:ectory)? | path | file )
      | rdzv [-_] endpoint | master [-_] addr (?:ess)?
    )""",
    re.VERBOSE | re.IGNORECASE,
)
"""Options whose value says nothing of speed. Not ``rank``, which may be LoRA's."""

_RANDOM_ID = re.compile(
    r"""
    \b [0-9a-f]{8} (?: - [0-9a-f]{4} ){3} - [0-9a-f]{12} \b                     # a UUID
  | (?<!\d) 20\d\d ([-_]?) [01]\d \1 [0-3]\d                                    # a day, and
    (?: [-_T]? [0-2]\d [-_:]? [0-5]\d (?: [-_:]? [0-5]\d (?:\.\d+)? )? Z? )? (?!\d)  # its time
  | (?<!\d) 1[6-9]\d{8} (?: \d{3} ){0,3} (?!\d)                                 # Unix time
  | (?<= /proc/ ) \d+
  | (?<= \btracker_fd= ) \d+ | (?<= \bpipe_handle= ) \d+ | (?<= \bparent_pid= ) \d+  # spawned
    """,
    re.VERBOSE | re.IGNORECASE,
)

_ENDPOINT = re.compile(
    r"( :// [^/:\s]+ | \blocalhost | \b\d{1,3} (?: \.\d{1,3} ){3} | \[ [0-9a-f:]+ \] )"
    r" : \d{2,5} \b",
    re.VERBOSE | re.IGNORECASE,
)

_SWITCH = re.compile(r"-(?!\d)")
_TEMPORARY = re.compile(r"(?:/tmp|/dev/shm|/run)/[^\s=,:;]+")
_RANDOM_PATH = re.compile(r"(?<=/) (?: tmp\w{6,} | \d{3,} ) (?= / | \. | $)", re.VERBOSE)


def command_digest(command: Sequence[str] | str) -> str:
    """Sixteen hexadecimal digits for a command's arguments, or for the name of an image.

    A text without spaces is an image, of which everything counts; any other is a command line.
    """
    if isinstance(command, str) and len(command.split()) == 1:
        told = ["image", command.strip()]
    else:
        arguments = [command] if isinstance(command, str) else command
        told = ["command", *_stable_text(" ".join(arguments).split())]
    text = "\0".join(told).encode("utf-8", "surrogatepass")
    return blake2s(text, digest_size=_DIGEST_BYTES).hexdigest()


def _stable_text(words: Sequence[str]) -> Iterator[str]:
    """What is left of a command line; how it was quoted is nothing."""
    skip = False
    for place, word in enumerate(words):
        if place == 0:
            yield word.rpartition("/")[2]
            continue
        if skip and not _SWITCH.match(word):
            skip = False
            continue
        name, equals, _ = word.partition("=")
        volatile = _VOLATILE.fullmatch(name.lstrip("-")) is not None
        skip = volatile and not equals and name.startswith("-")
        yield name if volatile and (equals or skip) else _plain(word)


def _plain(word: str) -> str:
    word = _RANDOM_ID.sub(_WILDCARD, word)
    word = _ENDPOINT.sub(rf"\1:{_WILDCARD}", word)
    return _TEMPORARY.sub(lambda path: _RANDOM_PATH.sub(_WILDCARD, path[0]), word)


__all__ = [
    "CertifiedSetting",
    "CertifiedSettings",
    "JobKey",
    "command_digest",
    "from_json",
    "to_json",
]

VERSION = 1
MAX_CERTIFIED = 256
"""Entries; of more, the one that was not used for longest goes."""

MAX_FAILURES = 2
"""An entry that failed so often, with no success between, is forgotten."""

_MAX_TEXT = 512  # characters of a name that is read back
_MAX_DEVICES = 1024  # levels of one entry that are read back


class JobKey(NamedTuple):
    """A job on its devices, and what is turned."""

    fingerprint: Fingerprint
    knob: Knob


class CertifiedSetting(NamedTuple):
    """What was certified, and how often it has failed since."""

    remembered: CertifiedLevels
    failures: int = 0


_EMPTY: Mapping[JobKey, CertifiedSetting] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CertifiedSettings:
    """What is remembered, least recently used first."""

    entries: Mapping[JobKey, CertifiedSetting] = field(default_factory=lambda: _EMPTY)

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None:
        """What to try first; None for what is not known."""
        entry = self.entries.get(JobKey(fingerprint, knob))
        return entry.remembered if entry is not None else None

    def used(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedSettings:
        """After an entry was tried: it is the last to be let go."""
        key = JobKey(fingerprint, knob)
        entry = self.entries.get(key)
        return self if entry is None else self._with(key, entry)

    def certified(self, fingerprint: Fingerprint, remembered: CertifiedLevels) -> CertifiedSettings:
        """After a setting was certified: it takes the place of what was remembered."""
        return self._with(JobKey(fingerprint, remembered.knob), CertifiedSetting(remembered))

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedSettings:
        """After a remembered setting could not be certified, or had to be released."""
        key = JobKey(fingerprint, knob)
        entry = self.entries.get(key)
        if entry is None:
            return self
        if entry.failures + 1 < MAX_FAILURES:
            return self._with(key, entry._replace(failures=entry.failures + 1))
        return CertifiedSettings(
            MappingProxyType({k: e for k, e in self.entries.items() if k != key})
        )

    def _with(self, key: JobKey, entry: CertifiedSetting) -> CertifiedSettings:
        entries = {k: e for k, e in self.entries.items() if k != key}
        entries[key] = entry
        for oldest in list(entries)[: max(0, len(entries) - MAX_CERTIFIED)]:
            del entries[oldest]
        return CertifiedSettings(MappingProxyType(entries))


# ------------------------------------------------------------------------------------- as JSON


def to_json(book: CertifiedSettings) -> dict[str, Any]:
    """The book as plain values for JSON."""
    return {
        "version": VERSION,
        "entries": [
            {
                "fingerprint": asdict(key.fingerprint),
                "knob": key.knob.value,
                "failures": entry.failures,
                "setting": _setting_to_json(entry.remembered),
            }
            for key, entry in book.entries.items()
        ],
    }


def _setting_to_json(remembered: CertifiedLevels) -> dict[str, Any]:
    return {
        "level": remembered.level,
        "original": remembered.original,
        "slowdown": remembered.slowdown,
        "saving": remembered.saving,
        "pairs": remembered.pairs,
        "noise": remembered.noise,
        "levels": dict(remembered.levels),
    }


def from_json(facts: object) -> CertifiedSettings:
    """The book that :func:`to_facts` told. An entry that does not read is left out.

    A book of another version is an empty one: what is remembered can be learned anew.
    """
    book = CertifiedSettings()
    if not isinstance(facts, Mapping) or facts.get("version") != VERSION:
        return book
    entries = facts.get("entries")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return book
    read: dict[JobKey, CertifiedSetting] = {}
    for one in entries:
        try:
            key, entry = _setting_from_json(one)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
        read.pop(key, None)
        read[key] = entry
    return CertifiedSettings(MappingProxyType(dict(list(read.items())[-MAX_CERTIFIED:])))


def _setting_from_json(facts: Any) -> tuple[JobKey, CertifiedSetting]:
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
    remembered = CertifiedLevels(
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
    if highest > remembered.original or len(levels) > _MAX_DEVICES or failures >= MAX_FAILURES:
        raise ValueError("no setting that was ever certified")
    return JobKey(fingerprint, remembered.knob), CertifiedSetting(remembered, failures)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
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
