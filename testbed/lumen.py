"""The vendor of GPUs that the guide to plugins describes, on boards whose truth is known."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from wattspan.ports import Clock

GUIDE = Path(__file__).parent.parent / "docs" / "how-to" / "write-a-plugin.md"


def sketch() -> str:
    """The source text of the vendor's module in the guide."""
    section = GUIDE.read_text(encoding="utf-8").split("## A vendor of GPUs\n")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def load(monkeypatch: Any, pylumen: Any) -> ModuleType:
    """The module of the guide, with ``pylumen`` as the binding that it imports."""
    monkeypatch.setitem(sys.modules, "pylumen", pylumen)
    module = ModuleType("lumen.gpus")
    exec(compile(sketch(), str(GUIDE), "exec"), module.__dict__)
    return module


class LumenError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Board:
    """A board with a constant power. ``status`` is the error of all its calls."""

    watts: float = 300.0
    requested: float = 500.0
    bound: int | None = None
    busy: int = 0
    status: int = 0
    denied: bool = False
    processes: dict[int, int] = field(default_factory=dict)
    joules: float = 1000.0
    since: int = 0


class Pylumen:
    """The binding: a module's functions, by a clock."""

    LumenError = LumenError

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.boards = {"0000:0a:00.0": Board(), "0000:0b:00.0": Board()}
        self.started = 0

    @property
    def first(self) -> Board:
        return self.boards["0000:0a:00.0"]

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.started -= 1

    def addresses(self) -> list[str]:
        return [address for address, board in self.boards.items() if not board.status]

    def board(self, address: str) -> Board:
        return self._answering(self.boards[address])

    def _answering(self, board: Board) -> Board:
        if not self.started:
            raise LumenError(4)
        if board.status:
            raise LumenError(board.status)
        return board

    def model(self, board: Board) -> str:
        self._answering(board)
        return "Lumen L1"

    def energy(self, board: Board) -> int:
        self._answering(board)
        now = self.clock.monotonic()
        board.joules += board.watts * (now - board.since) / 1e9 if board.since else 0
        board.since = now
        return int(board.joules * 1000)

    def power(self, board: Board) -> float:
        return self._answering(board).watts

    def busy(self, board: Board) -> int:
        return self._answering(board).busy

    def temperature(self, board: Board) -> int:
        self._answering(board)
        return 50

    def processes(self, board: Board) -> dict[int, int]:
        return dict(self._answering(board).processes)

    def limits(self, board: Board) -> dict[str, float]:
        requested = self._answering(board).requested
        return {"minimum": 200, "default": 500, "maximum": 500, "requested": requested}

    def clocks(self, board: Board) -> dict[str, int | None]:
        bound = self._answering(board).bound
        return {"lowest": 500, "highest": 2000, "now": bound or 2000, "bound": bound}

    def set_limit(self, board: Board, watts: float) -> None:
        self._set(board)
        board.requested = watts

    def bound_clock(self, board: Board, megahertz: int | None) -> None:
        self._set(board)
        board.bound = megahertz

    def _set(self, board: Board) -> None:
        if self._answering(board).denied:
            raise LumenError(2)
