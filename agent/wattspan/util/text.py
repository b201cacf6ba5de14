"""Text from outside, made safe to print on a terminal, in a log or in a table, and bounded."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from hashlib import blake2s

# The longest labels, in characters. Names are cut where they enter, and again, by the same
# length, where an exporter writes them.
MAX_LABEL = 128  # of groups, services and spans
MAX_COMMAND = 64
MAX_USER = 64
MAX_JOB_NAME = 100


def printable(text: str, instead: str = "?") -> str:
    """``text`` on one line, with ``instead`` in place of every character that does not print.

    Drivers, jobs, spans and other programs choose names and messages. C0 and C1 control
    characters would command the terminal, line separators would forge a line of a log, and bidi
    controls and zero-width characters would disguise a name; lone surrogates cannot be encoded.
    Python calls none of them printable.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else instead for c in text)


def clean_label(text: str, longest: int) -> str:
    """``text`` as the name of a process, group or user: printable, in ``longest`` characters.

    A longer text loses its middle, because both ends of a path are informative.
    """
    text = printable(text)
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    return f"{text[:head]}…{text[-(longest - 1 - head) :]}"


def cut_with_digest(text: str, longest: int, fit: str | None = None) -> str:
    """``fit``, by default ``text`` itself, in ``longest`` characters: for spans and exporters.

    A text that is changed ends in a digest of the whole, so that two names remain two.
    """
    if fit is None or fit == text:
        if len(text) <= longest:
            return text
        fit = text
    digest = blake2s(text.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    return f"{fit[: longest - 9]}~{digest}"


_FORMULA_STARTS = frozenset("=+-@\t\r\n'＝＋－＠")
"""First characters of formulas in spreadsheets, and the apostrophe that marks text."""


def pip_command(*packages: str) -> str:
    """Return the command that installs packages beside this program.

    Its environment need not have a pip. It never names wattspan itself: as long as nobody owns this
    name on the package index, whoever registers it could run programs on the reader's host.
    """
    return f"`pip --python {shlex.quote(sys.prefix)} install {shlex.join(packages)}`"


NO_PYARROW = (
    "Parquet needs the package pyarrow, which is not installed; "
    f"run {pip_command('pyarrow')}, or choose another format."
)


def escape_formula(text: str) -> str:
    """Return ``text`` as a cell that no spreadsheet interprets as a formula.

    A leading apostrophe marks such text; text that begins with an apostrophe gets another one, so
    that removing one apostrophe always restores the original.
    """
    return f"'{text}" if text[:1] in _FORMULA_STARTS else text


def has_pyarrow() -> bool:
    """Return True if pyarrow is installed, without importing it."""
    return importlib.util.find_spec("pyarrow") is not None


def natural_key(text: str) -> tuple[tuple[int, str], ...]:
    """A sort key that puts ``package-2`` before ``package-10``."""
    return tuple(
        (int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)
    )
