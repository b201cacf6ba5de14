"""Identity of a job across runs, and the settings that were certified for it.

:func:`command_digest` is a digest of a command line, equal for every run of the same job. Parts
that differ between runs and do not affect speed are left out: the interpreter's path, ports,
process ids, ranks, seeds, names and output directories of runs, times, UUIDs and the random parts
of temporary paths. Everything else counts, in its order: batch size, model, precision, data set.
In doubt a part counts: an unknown job costs a search, a wrong match only a failed certification.

A remembered setting is the first candidate of the next search; it is certified again each time,
and forgotten after :data:`MAX_FAILURES` failures in a row.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2s
from typing import Annotated, Any, Literal

import msgspec

from wattspan.model import Knob
from wattspan.tuning.decisions.values import CertifiedLevels, Fingerprint

_DIGEST_BYTES = 8

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
"""Options whose value does not affect speed. ``rank`` is not one: it may be LoRA's."""

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
    """Digest of a command's arguments or of an image name: 16 hexadecimal digits.

    A string without spaces is an image name, of which everything counts; other strings are
    command lines.
    """
    if isinstance(command, str) and len(command.split()) == 1:
        parts = ["image", command.strip()]
    else:
        arguments = [command] if isinstance(command, str) else command
        parts = ["command", *_stable_words(" ".join(arguments).split())]
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return blake2s(text, digest_size=_DIGEST_BYTES).hexdigest()


def _stable_words(words: Sequence[str]) -> Iterator[str]:
    """The parts of a command line that are equal in every run; quoting is ignored."""
    skip = False
    for position, word in enumerate(words):
        if position == 0:
            yield word.rpartition("/")[2]
            continue
        if skip and not _SWITCH.match(word):
            skip = False
            continue
        name, equals, _ = word.partition("=")
        volatile = _VOLATILE.fullmatch(name.lstrip("-")) is not None
        skip = volatile and not equals and name.startswith("-")
        yield name if volatile and (equals or skip) else _without_random_parts(word)


def _without_random_parts(word: str) -> str:
    word = _RANDOM_ID.sub(_WILDCARD, word)
    word = _ENDPOINT.sub(rf"\1:{_WILDCARD}", word)
    return _TEMPORARY.sub(lambda path: _RANDOM_PATH.sub(_WILDCARD, path[0]), word)


MAX_CERTIFIED = 256
"""Entries; the least recently changed one is removed first."""

MAX_FAILURES = 2
"""Failures in a row after which an entry is removed."""


class CertifiedEntry(msgspec.Struct, frozen=True):
    """A certified setting of a job, as in the file."""

    fingerprint: Fingerprint
    knob: Knob
    failures: Annotated[int, msgspec.Meta(ge=0, lt=MAX_FAILURES)]  # since it was certified
    setting: CertifiedLevels


@dataclass(frozen=True, slots=True)
class CertifiedSettings:
    """Certified settings by job and knob, least recently changed first."""

    entries: Mapping[tuple[Fingerprint, Knob], CertifiedEntry] = field(default_factory=dict)

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None:
        """The setting to certify first; None for an unknown job."""
        entry = self.entries.get((fingerprint, knob))
        return entry.setting if entry is not None else None

    def certified(
        self, fingerprint: Fingerprint, knob: Knob, setting: CertifiedLevels
    ) -> CertifiedSettings:
        """Replace the job's entry by a newly certified setting."""
        return self.with_entry(CertifiedEntry(fingerprint, knob, 0, setting))

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedSettings:
        """Record that the job's setting was not certified again, or had to be released."""
        entry = self.entries.get((fingerprint, knob))
        if entry is None:
            return self
        if entry.failures + 1 < MAX_FAILURES:
            return self.with_entry(msgspec.structs.replace(entry, failures=entry.failures + 1))
        return CertifiedSettings({k: one for k, one in self.entries.items() if one is not entry})

    def with_entry(self, entry: CertifiedEntry) -> CertifiedSettings:
        """Add or replace an entry, which becomes the latest one."""
        key = entry.fingerprint, entry.knob
        others = [(k, one) for k, one in self.entries.items() if k != key]
        return CertifiedSettings(dict([*others, (key, entry)][-MAX_CERTIFIED:]))


class _FileRecord(msgspec.Struct):
    version: Literal[1]
    entries: list[Any]


def to_json(settings: CertifiedSettings) -> dict[str, Any]:
    """The contents of the file, as values for JSON."""
    return {"version": 1, "entries": msgspec.to_builtins(list(settings.entries.values()))}


def from_json(facts: object) -> CertifiedSettings:
    """The settings in a decoded file; invalid entries are left out.

    A file of another version is an empty one: its contents can be learned again.
    """
    settings = CertifiedSettings()
    # UnicodeEncodeError: a lone surrogate as a key
    with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
        for one in msgspec.convert(facts, _FileRecord).entries:
            with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
                settings = settings.with_entry(msgspec.convert(one, CertifiedEntry))
    return settings
