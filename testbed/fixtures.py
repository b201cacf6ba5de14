"""Makers of fixtures that enter one context manager; assign each to the fixture's name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

Scope = Literal["function", "module"]


def entered(make: Callable[[], AbstractContextManager[Any]], scope: Scope = "function") -> Any:
    """A fixture of the value of ``make()`` as a context manager."""

    @pytest.fixture(scope=scope)
    def fixture() -> Iterator[Any]:
        with make() as found:
            yield found

    return fixture


def entered_in(make: Callable[[Path], AbstractContextManager[Any]]) -> Any:
    """The same of ``make(tmp_path)``."""

    @pytest.fixture
    def fixture(tmp_path: Path) -> Iterator[Any]:
        with make(tmp_path) as found:
            yield found

    return fixture


def entered_once_in(make: Callable[[Path], AbstractContextManager[Any]], folder: str) -> Any:
    """The same for all tests of a module, in a temporary folder of this name."""

    @pytest.fixture(scope="module")
    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
        with make(tmp_path_factory.mktemp(folder)) as found:
            yield found

    return fixture


@contextmanager
def short_path(name: str) -> Iterator[Path]:
    """A path in a temporary folder that is short enough for the address of a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="wattspan-") as folder:
        yield Path(folder) / name
