"""A short name for what a job runs, the same whenever the same job is run again.

Left out is what differs from one run to the next and has nothing to do with speed: the place of
the interpreter, ports, process ids, ranks, seeds, names of runs and where they write, moments,
UUIDs, and the random parts of temporary paths. All else counts, in its order: a batch size, a
model, a precision or a data set makes another job. When in doubt a part counts: an unknown job
costs a search, a wrong memory costs a try that fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import blake2s

_LENGTH = 8  # bytes

_ANY = "*"

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

_CHANCE = re.compile(
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
_RANDOM = re.compile(r"(?<=/) (?: tmp\w{6,} | \d{3,} ) (?= / | \. | $)", re.VERBOSE)


def digest(command: Sequence[str] | str) -> str:
    """Sixteen hexadecimal digits for a command's arguments, or for the name of an image.

    A text without spaces is an image, of which everything counts; any other is a command line.
    """
    if isinstance(command, str) and len(command.split()) == 1:
        told = ["image", command.strip()]
    else:
        arguments = [command] if isinstance(command, str) else command
        told = ["command", *_lasting(" ".join(arguments).split())]
    text = "\0".join(told).encode("utf-8", "surrogatepass")
    return blake2s(text, digest_size=_LENGTH).hexdigest()


def _lasting(words: Sequence[str]) -> Iterator[str]:
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
    word = _CHANCE.sub(_ANY, word)
    word = _ENDPOINT.sub(rf"\1:{_ANY}", word)
    return _TEMPORARY.sub(lambda path: _RANDOM.sub(_ANY, path[0]), word)
