from dataclasses import replace

from rich.console import Console
from testbed.snapshots import busy_host
from testbed.top_view import document

from wattspan.api.snapshot_document import SnapshotDocument
from wattspan.cli.top.controls import SortKey, ViewOptions
from wattspan.cli.top.view import fit_to_console, print_once, watch
from wattspan.testing import ManualClock


class Typist:
    """Keys pressed during consecutive waits; time advances without a key."""

    def __init__(self, clock: ManualClock, *waits: str) -> None:
        self._clock = clock
        self._waits = list(waits)
        self.waited: list[float] = []

    def wait(self, seconds: float) -> list[str]:
        self.waited.append(seconds)
        key = self._waits.pop(0) if self._waits else "q"
        if not key:
            self._clock.advance(seconds)
            return []
        return [key]


def shown(*waits: str, running: int = 100) -> tuple[list[str], Typist, int]:
    """Screens drawn, keys read, and the number of snapshots requested."""
    clock = ManualClock()
    typist = Typist(clock, *waits)
    console = Console(
        width=80, height=24, color_system=None, force_terminal=True, legacy_windows=False
    )
    asked = 0

    def view() -> SnapshotDocument:
        nonlocal asked
        asked += 1
        return document(replace(busy_host(), host=f"host{asked}"))

    with console.capture() as captured:
        watch(
            view, ViewOptions(), clock=clock, console=console, keys=typist, interval=2 * 10**9,
            running=lambda: asked < running,
        )  # fmt: skip
    return captured.get().split("\x1b[H"), typist, asked


def test_watch_shows_the_newest_snapshot_each_interval() -> None:
    screens, typist, asked = shown("", "", "q")
    assert asked == 3
    assert [f"host{n}" in "".join(screens) for n in (1, 2, 3)] == [True] * 3
    assert typist.waited == [2.0, 2.0, 2.0]


def test_key_takes_effect_without_a_new_snapshot() -> None:
    screens, _, asked = shown("s", "q")
    assert asked == 1
    assert "s joules" in screens[-1]


def test_keys_do_not_delay_the_next_snapshot() -> None:
    _, typist, asked = shown("s", "", "q")
    assert asked == 2
    assert typist.waited[1] <= 2.0


def test_watch_ends_when_running_is_false() -> None:
    assert shown("", "", "", running=2)[2] == 2


def test_options_are_fitted_to_the_terminal() -> None:
    terminal = Console(width=77, height=33, force_terminal=True)
    chosen = fit_to_console(ViewOptions(sort=SortKey.NAME), terminal, "stale")
    assert (chosen.width, chosen.height, chosen.keys) == (77, 33, True)
    assert (chosen.notice, chosen.sort) == ("stale", SortKey.NAME)


def test_print_once_is_unlimited_in_height_and_without_keys() -> None:
    console = Console(width=80, height=10, color_system=None, force_terminal=True)
    with console.capture() as captured:
        print_once(lambda: document(busy_host()), ViewOptions(), console)
    assert len(captured.get().splitlines()) > 10
    assert "quit" not in captured.get()
