"""The table of ``wattspan measure``: what the command spent, and what the devices did meanwhile."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from wattspan.cli import figures
from wattspan.cli.measure_data import (
    EVERYTHING,
    Figure,
    Result,
    Run,
    Sum,
    of_command,
    of_devices,
    of_host,
)
from wattspan.util.text import printable

_LINE = "  {:<36} {:>8} {:>8} {:>8} {:>9}   {}"
_LONGEST = 60  # letters of the command that are repeated
_WIDEST = 36  # letters of a device's name


def lines(result: Result) -> Iterator[str]:
    """The table, line by line."""
    last = result.last
    yield ""
    if not result.kinds:
        yield f" The energy of `{_command(result)}` is not known."
        yield from (f"  {note}" for note in result.notes)
        return
    yield f" Energy of `{_command(result)}` on {printable(last.host_name)}:"
    if last.emulated:
        yield " EMULATED HOST: these figures are true of no machine"
    yield ""
    spread = "stdev" if len(result.runs) > 1 else ""
    yield _LINE.format("", "energy", spread, "off by", "power", "how")
    yield " the command's processes"
    for kind in result.kinds:
        yield _row(result, kind, of_command, kind, last.provenance.get(kind, ""))
    yield _row(result, "together", of_command, EVERYTHING)
    yield " the host's devices, whoever used them"
    for key, part in result.parts.items():
        name = printable(f"{part.kind} {part.name}")
        yield _row(result, name, of_devices, key, part.provenance)
    yield _row(result, "together", of_host, EVERYTHING)
    if result.idle.mean is not None:
        yield _LINE.format("of these idle", _joules(result.idle.mean), "", "", "", "").rstrip()
    yield ""
    yield from _foot(result)
    yield ""


def _row(result: Result, name: str, of: Callable[[Run], Sum], key: str, how: str = "") -> str:
    energy, seconds = result.joules(of, key), result.seconds.mean
    power = energy.mean / seconds * 1000 if energy.mean is not None and seconds else None
    return _LINE.format(
        name if len(name) <= _WIDEST else f"{name[: _WIDEST - 3]}...",
        _joules(energy.mean),
        _spread(energy),
        _joules(result.doubt(of, key)),
        f"{figures.watts(None if power is None else round(power))} W",
        how,
    ).rstrip()


def _foot(result: Result) -> Iterator[str]:
    runs = len(result.runs)
    seconds, cpu = result.seconds, result.cpu_seconds
    yield f"  {_seconds(seconds)} elapsed, {_seconds(cpu)} of CPU time" + (
        f"; means of {runs} runs" if runs > 1 else ""
    )
    if result.coverage < 0.9995:
        yield (
            f"  Only {result.coverage:.1%} of the time was measured in every kind: "
            "the figures are of that part."
        )
    if not all(run.complete or run.trouble for run in result.runs):
        yield "  Some figures had not settled when they were read, and lack their last part."
    if result.idle_unknown:
        names = printable(", ".join(result.idle_unknown))
        yield f"  Idle power is not told apart on {names}: processes are charged with it too."
    failed = sorted({run.code for run in result.runs if run.code})
    if failed and runs > 1:
        yield f"  Some runs ended with exit code {', '.join(map(str, failed))}."
    for note in result.notes:
        yield f"  {note}"


def _command(result: Result) -> str:
    text = printable(shlex.join(result.command))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _joules(joules: float | None) -> str:
    return figures.joules(None if joules is None else round(joules * 1e6))


def _seconds(figure: Figure) -> str:
    spread = _spread(figure)
    return f"{figure.mean:.3f} s" + (f" ({spread})" if spread else "")


def _spread(figure: Figure) -> str:
    """The standard deviation over the runs, as a part of the mean."""
    if figure.mean is None or figure.stdev is None:
        return ""
    return f"±{figure.stdev / figure.mean:.1%}" if figure.mean else figures.UNKNOWN
