"""Seeded damage to journal files and audit logs, for tests and for the attack schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

Files = Mapping[str, bytes]
Damage = Callable[[bytes, bytes, Random], bytes | None]
"""Makes of a file's content, and of its content in an earlier generation, the damaged one."""


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every journal file in ``directory``."""
    return {path.name: path.read_bytes() for path in directory.glob("journal-*")}


def _bit_flips(data: bytes, old: bytes, rng: Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _truncation(data: bytes, old: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _zeroed_page(data: bytes, old: bytes, rng: Random) -> bytes:
    page = rng.choice([64, 512, 4096])
    start = rng.randrange(0, len(data), page)
    return data[:start] + bytes(min(page, len(data) - start)) + data[start + page :]


def _stale_page(data: bytes, old: bytes, rng: Random) -> bytes:
    page = rng.choice([64, 512, 4096])
    start = rng.randrange(0, len(data), page)
    return data[:start] + old[start : start + page] + data[start + page :]


def _empty(data: bytes, old: bytes, rng: Random) -> bytes:
    return b""


def _garbage(data: bytes, old: bytes, rng: Random) -> bytes:
    return rng.randbytes(rng.choice([1, 100, len(data)]))


def _old_generation(data: bytes, old: bytes, rng: Random) -> bytes:
    return old


def _missing(data: bytes, old: bytes, rng: Random) -> None:
    return None


def _duplicated_line(data: bytes, old: bytes, rng: Random) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines, rng.choice(lines)])


def _dropped_line(data: bytes, old: bytes, rng: Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    return b"".join(lines)


def _spliced(data: bytes, old: bytes, rng: Random) -> bytes:
    lines = [*data.splitlines(keepends=True), *old.splitlines(keepends=True)]
    return b"".join(rng.sample(lines, k=min(2, len(lines))))


DAMAGES: tuple[Damage, ...] = (
    _bit_flips, _truncation, _zeroed_page, _stale_page, _empty, _garbage,
    _old_generation, _missing, _duplicated_line, _dropped_line, _spliced,
)  # fmt: skip
AUDIT_DAMAGES: tuple[Damage, ...] = (_bit_flips, _truncation, _zeroed_page, _empty, _missing)


def corrupt_journal(directory: Path, history: Sequence[Files], rng: Random) -> str:
    """Damage one or both copies; return a description. ``history`` are snapshots, the newest last.

    Two kinds of damage are left out, because nothing can tell them from a sound journal: the
    removal of every file, and the replacement of every file by the same earlier generation.
    """
    names = sorted(history[-1])
    chosen = names if rng.random() < 0.6 else [rng.choice(names)]
    done, unseen = [], {_old_generation, _stale_page, _missing}
    for name in chosen:
        allowed = [one for one in DAMAGES if one not in unseen or len(done) + 1 < len(names)]
        damage = rng.choice(allowed)
        data, old = history[-1][name], rng.choice(history[:-1]).get(name, b"")
        _put(directory / name, damage(data, old, rng))
        done.append(damage.__name__.strip("_"))
    if len(names) > 1 and rng.random() < 0.1:
        first, second = (directory / name for name in names[:2])
        if first.exists() and second.exists():
            swapped = first.read_bytes(), second.read_bytes()
            second.write_bytes(swapped[0])
            first.write_bytes(swapped[1])
            done.append("swapped")
    return ", ".join(done)


def corrupt_audit(path: Path, rng: Random) -> str:
    """Damage the audit log in half of the cases; return a description."""
    if rng.random() < 0.5:
        return "sound audit log"
    damage = rng.choice(AUDIT_DAMAGES)
    _put(path, damage(path.read_bytes(), b"", rng))
    return f"audit log: {damage.__name__.strip('_')}"


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink()
    else:
        path.write_bytes(data)
