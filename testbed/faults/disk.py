"""Disks that are full, and stores that are ruined or held by somebody else.

Each part that writes has a disk of its own here, so that one at a time fails: the store, the spool
of spans for a collector, the files exporter, the capper's journal and record.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable

from testbed.faults.arrivals import NONE_DROPPED, all_arrived
from testbed.faults.collector import Collector
from testbed.faults.disks import Disks
from testbed.faults.judge import flowing
from testbed.faults.observation import Sight
from testbed.faults.power_limits import Limits
from testbed.faults.schedule import Claim, Fault, Sign, down, rises
from testbed.faults.stage import Stage
from testbed.waiting import eventually

STORE = "state/wattspan-emulated.sqlite"
SPOOL, CAPPER = "state/forward", "state/capper-emulated"


class DiskStage(Stage):
    """A stage whose agent has four small disks, tunes the job it finds, and forwards spans."""

    def __init__(self) -> None:
        self.disks = Disks({"state": "6m", SPOOL: "384k", CAPPER: "256k", "files": "2m"})
        self.collector = Collector()
        self.locker: subprocess.Popen[bytes] | None = None
        self.make_room: Callable[[], None] = lambda: None
        try:
            super().__init__(
                within=self.disks.within,
                profile="one-socket-h100",
                settings={
                    "agent.state_dir": self.disks.folder / "state",
                    "store.interval": "1s",
                    "store.enabled": "true",
                    "spans.forward": self.collector.url,
                    "spans.forward_spool": "true",
                    "exporters.files.directory": self.disks.folder / "files",
                    "exporters.files.interval": "500ms",
                    "exporters.files.rotate": "2s",
                    "exporters.files.rotate_size": "256KiB",
                    "exporters.files.keep": "2",
                    "caps.users": "[]",
                    "autotune.mode": "apply",
                    "autotune.apply_found": "true",
                    "autotune.block": "300ms",
                    "autotune.block_units": 5,
                    "autotune.settle": "100ms",
                    "autotune.settle_units": 1,
                },
            )
        except BaseException:
            self.collector.close()
            self.disks.close()
            raise

    def close(self) -> None:
        super().close()
        if self.locker is not None:
            self.locker.communicate()
        self.collector.close()
        self.disks.close()


def of(stage: Stage) -> DiskStage:
    assert isinstance(stage, DiskStage)
    return stage


def fill(path: str) -> Callable[[Stage], None]:
    return lambda stage: of(stage).disks.fill(path)


def free(path: str) -> Callable[[Stage], None]:
    return lambda stage: of(stage).disks.free(path)


def forbid(path: str) -> Callable[[Stage], None]:
    return lambda stage: of(stage).disks.forbid_writing(path)


def permit(path: str) -> Callable[[Stage], None]:
    return lambda stage: of(stage).disks.permit_writing(path)


def journal_lost(
    name: str, inject: Callable[[Stage], None], end: Callable[[Stage], None], means: str
) -> Fault:
    """The capper's journal cannot be written: no limit but the originals may be in force."""
    turned: list[str] = []

    def look_and_end(stage: Stage) -> None:
        turned.clear()
        with Limits(stage.host.directory) as limits:
            try:  # the restore of a cap is a turn of the capper, which a busy host delays
                eventually(lambda: not limits.turned(), "the original limits")
            except AssertionError:
                turned[:] = limits.turned()
        end(stage)

    return Fault(
        name,
        inject,
        look_and_end,
        means,
        claims=[Claim("every power limit was the original at its end", lambda *_: not turned)],
        lasts=10.0,
        short=3.0,
    )


def _keep_full(stage: Stage) -> None:
    """Full it stays: the exporter makes room itself, when it removes its oldest files."""
    disks, over = of(stage).disks, threading.Event()

    def again() -> None:
        while not over.wait(0.02):
            disks.fill("files")

    disks.fill("files")
    filling = threading.Thread(target=again, daemon=True)
    filling.start()

    def end() -> None:
        over.set()
        filling.join()
        disks.free("files")

    of(stage).make_room = end


def _make_room(stage: Stage) -> None:
    of(stage).make_room()


def said(words: str) -> Callable[[Stage], str]:
    """For the table: the sentence of the log that has these words."""

    def note(stage: Stage) -> str:
        lines = [line for line in stage.said.splitlines() if words in line]
        sentence = lines[-1].removeprefix("wattspan: ") if lines else f"never told of {words}"
        return sentence.replace(str(of(stage).disks.folder), "...")

    return note


# ------------------------------------------------------------------------------------ the spool


def _spool_full(stage: Stage) -> None:
    of(stage).collector.behave("gone")
    of(stage).disks.fill(SPOOL)


def _spool_free(stage: Stage) -> None:
    of(stage).disks.free(SPOOL)
    of(stage).collector.behave("takes")


def emptied(before: Sight, at_end: Sight, now: Sight) -> bool:
    """The agent is healthy, and the queue for the collector is empty."""
    return (
        flowing(before, at_end, now)
        and now.total("wattspan_spans_forward_queue_bytes") == 0
        and now.total("wattspan_spans_forwarded_total")
        > at_end.total("wattspan_spans_forwarded_total")
    )


# ------------------------------------------------------------------------------- ruin and locks


def _scribble(stage: Stage) -> None:
    """Like a failing disk: every page, and the log, by which it would be healed."""
    for name in (STORE, f"{STORE}-wal"):
        path = of(stage).disks.outside(name)
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.write(b"not a database, not a database " * (size // 31 + 1))


LOCKER = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=20)
database.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


def _hold(stage: Stage) -> None:
    place = of(stage).disks.folder / STORE
    locker = subprocess.Popen(
        [*of(stage).disks.within, sys.executable, "-c", LOCKER, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert locker.stdout is not None
    if locker.stdout.readline() != b"held\n":
        raise RuntimeError("the store could not be locked")
    of(stage).locker = locker


def _let_go(stage: Stage) -> None:
    locker, of(stage).locker = of(stage).locker, None
    if locker is not None:
        locker.communicate()


def _kill(stage: Stage) -> None:
    stage.restart(signal.SIGKILL)


def replaced(before: Sight, at_end: Sight, now: Sight) -> bool:
    """Healthy, except that the damaged file is reported as long as the agent runs."""
    ended, risen = at_end.domains(), now.domains()
    return (
        before.domains().keys() <= risen.keys()
        and all(risen[name] > ended.get(name, 0) for name in risen)
        and all(value for _, value in now.pick("wattspan_source_up"))
        and bool(now.total("wattspan_source_unreadable", source="store"))
    )


FAULTS = [
    Fault(
        "the disk of the store is full",
        fill("state"),
        free("state"),
        "Totals continue; the history of `wattspan report` gets the missing energy in one sum"
        " as soon as there is space.",
        [down("store")],
        lasts=20.0,
        short=3.0,
        note=said("the disk is full"),
    ),
    Fault(
        "the disk of the files exporter is full",
        _keep_full,
        _make_room,
        "Rows of that time are in no file; they are counted.",
        [down("files"), rises("wattspan_agent_exporter_drops_total", exporter="files")],
        lasts=20.0,
        short=3.0,
    ),
    Fault(
        "the collector is away and the spool's disk is full",
        _spool_full,
        _spool_free,
        "Spans wait in memory, up to `spans.forward_queue`; none is lost unless the agent ends "
        "meanwhile.",
        [down("forward")],
        [NONE_DROPPED, all_arrived(lambda stage: of(stage).collector)],
        lasts=30.0,
        short=4.0,
        well=emptied,
        note=said("Cannot write waiting spans"),
    ),
    journal_lost(
        "the disk of the capper's journal is full",
        fill(CAPPER),
        free(CAPPER),
        "No cap is set without a journal; caps in force are restored; the job continues uncapped.",
    ),
    journal_lost(
        "the directory of the capper's journal becomes read-only",
        forbid(CAPPER),
        permit(CAPPER),
        "As a full disk of the journal.",
    ),
    Fault(
        "the state directory becomes read-only",
        forbid("state"),
        permit("state"),
        "Files that are open stay writable, the store's among them; the history of decisions has"
        " none of that time.",
        lasts=20.0,
        short=3.0,
    ),
    Fault(
        "another program keeps the store locked",
        _hold,
        _let_go,
        "End that program; nothing is lost, because the next write contains the whole difference.",
        [down("store")],
        lasts=20.0,
        short=4.0,
        note=said("holds its lock"),
    ),
    Fault(
        "the store's file is overwritten while it is written, and the agent killed",
        _scribble,
        _kill,
        "The damaged file is kept beside the new one for `sqlite3 .recover`; totals continue.",
        [
            Sign(
                "the file is set aside",
                lambda b, n: bool(n.total("wattspan_source_unreadable", source="store")),
            )
        ],
        unanswered="it is ended and started anew",
        lasts=5.0,
        short=3.0,
        well=replaced,
        note=said("it is corrupt"),
    ),
]
