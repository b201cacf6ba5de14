"""The targets by name, with the data to run one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
"""Inputs worth keeping, a folder a target: what once failed, and what leads far into a parser."""

MODULES = (
    "answers",
    "capper",
    "configuration",
    "devices",
    "kernel",
    "names",
    "network",
    "spans",
    "state",
)

Run = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    """One parser. ``whose`` names the origin of the bytes, ``holds`` the property of every input.

    ``watched`` are the packages whose branches tell the fuzzer that an input is new.
    ``samples`` are valid inputs, ``words`` the tokens of such inputs.
    """

    name: str
    run: Run
    whose: str
    holds: str
    watched: tuple[str, ...]
    samples: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    largest: int = 4096

    def kept(self) -> list[bytes]:
        """Its corpus."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).glob("*"))]

    def seeds(self) -> list[bytes]:
        """Start of a run."""
        return [*self.samples, *self.kept()]


_TARGETS: dict[str, Target] = {}


def target(
    name: str,
    *,
    whose: str,
    holds: str,
    watched: tuple[str, ...],
    samples: tuple[bytes, ...],
    words: tuple[bytes, ...] = (),
    largest: int = 4096,
) -> Callable[[Run], Run]:
    """Register a function under ``name``."""

    def register(run: Run) -> Run:
        assert name not in _TARGETS, name
        _TARGETS[name] = Target(name, run, whose, holds, watched, samples, words, largest)
        return run

    return register


def targets() -> dict[str, Target]:
    """Every target there is, in the order of names."""
    for module in MODULES:
        importlib.import_module(f"fuzz.{module}")
    return dict(sorted(_TARGETS.items()))
