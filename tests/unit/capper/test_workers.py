"""Worker processes of the capper: deadlines, hangs, crashes, and the end of a worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from testbed.waiting import eventually

from wattspan.capper.devices import REPLACE_AFTER, IsolatedActuator, WorkerPool
from wattspan.capper.workers import PROCESS_NAME
from wattspan.model import MILLISECOND, SECOND, CapKey, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, Clock
from wattspan.testing import ManualClock

KNOB = Knob.GPU_POWER
CRASH, UNKNOWN = 666, "gpu:unknown"


@dataclass
class FileActuator:
    """Limits in files of a folder. A device hangs while a FIFO of its name with ``.hang`` exists.

    The tests' process and the workers share nothing else.
    """

    folder: Path
    names: tuple[str, ...] = ("a", "b")
    knob: Knob = KNOB

    def slots(self) -> int:
        return len(self.names)

    def id_at(self, slot: int) -> str | None:
        self._wait(f"slot{slot}")
        return self.names[slot]

    def devices(self) -> tuple[KnobState, ...]:
        return tuple(self.read(name) for name in self.names)

    def read(self, device: str) -> KnobState:
        if device == UNKNOWN:
            raise ActuatorError("There is no such device.", Trouble.ABSENT, locked=True)
        self._wait(device)
        path = self.folder / device
        return KnobState(
            CapKey(self.knob, device),
            f"{os.getpid()} {len(list(Path('/proc/self/fd').iterdir()))}",
            requested=int(path.read_text()) if path.exists() else 700,
        )

    def write(self, device: str, value: int | None) -> KnobState:
        if value == CRASH:
            os._exit(1)
        self._wait(device)
        (self.folder / device).write_text(str(value))
        return self.read(device)

    def close(self) -> None:
        """No descriptor remains open."""

    def hang(self, name: str, on: bool = True) -> None:
        path = self.folder / f"{name}.hang"
        if on:
            os.mkfifo(path)
            return
        writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        os.close(writer)  # a blocked open continues

    def _wait(self, name: str) -> None:
        with suppress(FileNotFoundError):  # opening a FIFO blocks without a writer
            (self.folder / f"{name}.hang").open().close()


class Bench:
    """An isolated actuator over files, with a deadline that a healthy call never reaches."""

    def __init__(self, folder: Path, clock: Clock, deadline: int) -> None:
        self.files = FileActuator(folder)
        self.pool = WorkerPool([self.files], clock, deadline)
        self.actuator = IsolatedActuator(KNOB, self.pool)

    def trouble(self, device: str) -> Trouble | None:
        try:
            self.actuator.read(device)
        except ActuatorError as error:
            return error.trouble
        return None

    def pid(self, device: str) -> int:
        return int(self.actuator.read(device).name.split()[0])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def patient(tmp_path: Path, clock: ManualClock) -> Iterator[Bench]:
    bench = Bench(tmp_path, clock, 60 * SECOND)
    yield bench
    bench.pool.close()


@pytest.fixture
def hasty(tmp_path: Path, clock: ManualClock) -> Iterator[Bench]:
    """The deadline is over as soon as the clock is advanced; real waits are 50 ms each."""
    bench = Bench(tmp_path, clock, 50 * MILLISECOND)
    yield bench
    bench.pool.close()


def healthy(bench: Bench, device: str) -> None:
    """The device answers; on a busy machine its worker may first miss the short deadline."""
    eventually(lambda: bench.trouble(device) is None, f"{device} answers")


def test_each_device_is_read_and_written_in_a_process_of_its_own(patient: Bench) -> None:
    assert [state.key.device for state in patient.actuator.devices()] == ["a", "b"]
    assert patient.actuator.write("a", 500).requested == 500
    assert [patient.actuator.read(name).requested for name in "ab"] == [500, 700]
    assert len({os.getpid(), patient.pid("a"), patient.pid("b")}) == 3


def test_error_of_an_actuator_keeps_its_trouble(patient: Bench) -> None:
    with pytest.raises(ActuatorError, match="no such device") as caught:
        patient.actuator.read(UNKNOWN)
    assert (caught.value.trouble, caught.value.locked) == (Trouble.ABSENT, True)


def test_hung_device_is_stuck_and_the_others_answer(hasty: Bench) -> None:
    healthy(hasty, "b")
    hasty.files.hang("a")
    hasty.actuator.prefetch(["a", "b"])
    assert hasty.trouble("a") is Trouble.STUCK
    healthy(hasty, "b")
    hasty.files.hang("a", on=False)
    healthy(hasty, "a")


def test_stuck_error_names_the_device_and_the_deadline(hasty: Bench) -> None:
    hasty.files.hang("a")
    with pytest.raises(ActuatorError, match=r"Cannot reach a: .*deadline of 0.05 s.*reset"):
        hasty.actuator.read("a")


def test_late_reply_is_not_taken_for_a_new_one(hasty: Bench, clock: ManualClock) -> None:
    hasty.files.hang("a")
    assert hasty.trouble("a") is Trouble.STUCK
    hasty.files.hang("a", on=False)
    late = hasty.pool.worker("a")._channel
    assert late is not None
    eventually(lambda: _readable(late), "the late reply is there")
    (hasty.files.folder / "a").write_text("500")  # after it was read for the late reply
    clock.advance(1.0)
    eventually(lambda: hasty.trouble("a") is None, "a answers")
    assert hasty.actuator.read("a").requested == 500


def _readable(channel: object) -> bool:
    import select

    return bool(select.select([channel], [], [], 0)[0])


def test_prefetched_read_is_used_once(patient: Bench) -> None:
    patient.actuator.prefetch(["a"])
    assert patient.actuator.read("a").requested == 700
    assert patient.actuator.write("a", 500).requested == 500
    assert patient.actuator.read("a").requested == 500


def test_write_after_an_unused_prefetch_is_carried_out(patient: Bench) -> None:
    patient.actuator.prefetch(["a"])
    patient.actuator.prefetch(["a"])
    assert patient.actuator.write("a", 500).requested == 500


def test_worker_that_crashes_is_replaced_by_the_next_call(patient: Bench) -> None:
    before = patient.pid("a")
    with pytest.raises(ActuatorError, match="ended unexpectedly") as caught:
        patient.actuator.write("a", CRASH)
    assert caught.value.trouble is Trouble.RETRY
    assert patient.pid("a") != before


def test_worker_that_was_killed_between_calls_is_replaced(patient: Bench) -> None:
    before = patient.pid("a")
    os.kill(before, 9)
    eventually(lambda: patient.trouble("a") is None, "another worker answers")
    assert patient.pid("a") != before


def test_worker_blocked_for_long_is_replaced(hasty: Bench, clock: ManualClock) -> None:
    healthy(hasty, "a")
    before = hasty.pid("a")
    hasty.files.hang("a")
    assert hasty.trouble("a") is Trouble.STUCK
    clock.advance(ns=REPLACE_AFTER)
    assert hasty.trouble("a") is Trouble.STUCK
    hasty.files.hang("a", on=False)
    healthy(hasty, "a")
    eventually(lambda: hasty.trouble("a") is None and hasty.pid("a") != before, "another worker")


def test_blocked_slot_is_left_out_of_the_list(hasty: Bench, clock: ManualClock) -> None:
    healthy(hasty, "b")
    hasty.files.hang("slot0")

    def listed() -> tuple[str, ...]:
        # On a busy machine the other slot may be late too, and is then tried again only later.
        clock.advance(ns=REPLACE_AFTER)
        try:
            return tuple(state.key.device for state in hasty.actuator.devices())
        except ActuatorError:
            return ()

    assert eventually(listed, "the other slot is listed") == ("b",)


def test_close_ends_every_worker_also_a_hung_one(tmp_path: Path, clock: ManualClock) -> None:
    bench = Bench(tmp_path, clock, 50 * MILLISECOND)
    healthy(bench, "a")
    healthy(bench, "b")
    pids = [bench.pid("a"), bench.pid("b")]
    bench.files.hang("a")
    assert bench.trouble("a") is Trouble.STUCK
    bench.pool.close()
    for pid in pids:
        eventually(lambda pid=pid: not _runs(pid), "the worker has ended")


def _runs(pid: int) -> bool:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def test_worker_process_has_a_name_of_its_own(patient: Bench) -> None:
    name = Path(f"/proc/{patient.pid('a')}/comm").read_text().strip()
    assert name == PROCESS_NAME


def test_worker_holds_no_descriptor_of_its_parent(patient: Bench, tmp_path: Path) -> None:
    held = [(tmp_path / f"held{n}").open("w") for n in range(20)]
    # Standard streams, the channel, and the listing of the descriptors itself.
    assert int(patient.actuator.read("a").name.split()[1]) == 5
    for file in held:
        file.close()
