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

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2s
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

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


VERSION = 1
MAX_CERTIFIED = 256
"""Entries; the least recently used one is removed first."""

MAX_FAILURES = 2
"""Failures in a row after which an entry is removed."""


class JobKey(NamedTuple):
    fingerprint: Fingerprint
    knob: Knob


class CertifiedSetting(NamedTuple):
    remembered: CertifiedLevels
    failures: int = 0  # since it was certified


_EMPTY: Mapping[JobKey, CertifiedSetting] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CertifiedSettings:
    """Certified settings by job, least recently used first."""

    entries: Mapping[JobKey, CertifiedSetting] = field(default_factory=lambda: _EMPTY)

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedLevels | None:
        """The setting to certify first; None for an unknown job."""
        entry = self.entries.get(JobKey(fingerprint, knob))
        return entry.remembered if entry is not None else None

    def used(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedSettings:
        """Mark an entry as the most recently used one."""
        key = JobKey(fingerprint, knob)
        entry = self.entries.get(key)
        return self if entry is None else self._with(key, entry)

    def certified(self, fingerprint: Fingerprint, remembered: CertifiedLevels) -> CertifiedSettings:
        """Replace the job's entry by a newly certified setting."""
        return self._with(JobKey(fingerprint, remembered.knob), CertifiedSetting(remembered))

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> CertifiedSettings:
        """Record that the job's setting was not certified again, or had to be released."""
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
        return _latest(entries | {key: entry})


def _latest(entries: Mapping[JobKey, CertifiedSetting]) -> CertifiedSettings:
    return CertifiedSettings(MappingProxyType(dict(list(entries.items())[-MAX_CERTIFIED:])))


# ------------------------------------------------------------------------------- file format


_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Ratio = Annotated[float, msgspec.Meta(gt=-1e9, lt=1e9)]


class _SettingRecord(msgspec.Struct):
    level: _Count
    original: _Count
    slowdown: _Ratio
    saving: _Ratio
    pairs: _Count
    noise: _Ratio
    levels: Annotated[dict[str, _Count], msgspec.Meta(max_length=1024)]

    def __post_init__(self) -> None:
        if max(self.level, *self.levels.values(), 0) > self.original:
            raise ValueError("a level is above the original setting")


class _EntryRecord(msgspec.Struct):
    fingerprint: Fingerprint
    knob: Knob
    failures: Annotated[int, msgspec.Meta(ge=0, lt=MAX_FAILURES)]
    setting: _SettingRecord


class _FileRecord(msgspec.Struct):
    version: Annotated[int, msgspec.Meta(ge=VERSION, le=VERSION)]
    entries: list[Any]


def to_json(settings: CertifiedSettings) -> dict[str, Any]:
    """The contents of the file, as values for JSON."""
    return {
        "version": VERSION,
        "entries": [
            {
                "fingerprint": asdict(key.fingerprint),
                "knob": key.knob.value,
                "failures": entry.failures,
                "setting": {
                    **{
                        name: getattr(entry.remembered, name)
                        for name in _SettingRecord.__struct_fields__
                    },
                    "levels": dict(entry.remembered.levels),
                },
            }
            for key, entry in settings.entries.items()
        ],
    }


def from_json(facts: object) -> CertifiedSettings:
    """The settings in a decoded file; invalid entries are left out.

    A file of another version is an empty one: its contents can be learned again.
    """
    try:
        file = msgspec.convert(facts, _FileRecord)
    except (msgspec.ValidationError, UnicodeEncodeError):  # a lone surrogate as a key
        return CertifiedSettings()
    entries: dict[JobKey, CertifiedSetting] = {}
    for one in file.entries:
        try:
            entry = msgspec.convert(one, _EntryRecord)
        except (msgspec.ValidationError, UnicodeEncodeError):  # a lone surrogate as a key
            continue
        levels = CertifiedLevels(knob=entry.knob, **msgspec.structs.asdict(entry.setting))
        key = JobKey(entry.fingerprint, entry.knob)
        entries.pop(key, None)
        entries[key] = CertifiedSetting(levels, entry.failures)
    return _latest(entries)
