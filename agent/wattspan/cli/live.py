"""The live view: the newest snapshot on the screen, until somebody presses q."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.live import Live

from wattspan.cli.controls import Options, press
from wattspan.cli.keyboard import Keys
from wattspan.cli.view import render
from wattspan.ports import Clock, SnapshotView


def watch(
    view: SnapshotView,
    options: Options,
    *,
    clock: Clock,
    console: Console,
    keys: Keys,
    interval: int,
    running: Callable[[], bool] = lambda: True,
    notice: Callable[[], str] = lambda: "",
    note: Callable[[], str] = lambda: "",
) -> None:
    """Show ``view`` every ``interval`` nanoseconds while ``running`` and nobody quits.

    ``view`` is asked from this thread. Whoever owns ``keys`` opens and closes them.
    """
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        while running():
            snapshot = view()
            due = clock.monotonic() + interval
            while True:
                shown = fitted(replace(options, note=note()), console, notice())
                screen.update(render(snapshot, shown), refresh=True)
                typed = keys.wait((due - clock.monotonic()) / 1e9)
                for key in typed:
                    chosen = press(options, key)
                    if chosen is None:
                        return
                    options = chosen
                if not typed:
                    break


def fitted(options: Options, console: Console, notice: str = "") -> Options:
    """``options`` for the size and the abilities of ``console``."""
    return replace(
        options,
        width=console.width,
        height=console.height if console.is_terminal else None,
        ascii=not console.encoding.lower().startswith("utf"),
        keys=console.is_terminal,
        notice=notice or options.notice,
    )


def print_once(
    view: SnapshotView,
    options: Options,
    console: Console,
    notice: Callable[[], str] = lambda: "",
) -> None:
    """Print one snapshot, as long as it takes."""
    snapshot = view()
    plain = replace(fitted(options, console, notice()), height=None, keys=False)
    console.print(render(snapshot, plain))
