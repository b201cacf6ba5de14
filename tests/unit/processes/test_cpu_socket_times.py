"""Programs are the machine code of the kernel's instruction set."""

import sys
from pathlib import Path

import pytest
from testbed.ebpf_machine import CPUS, EVENTS, TOTALS, EbpfMachine

from wattspan.processes.cpu_socket_times import SocketTimes, program
from wattspan.processes.ebpf import LOOKUP, Instruction, Op, assemble
from wattspan.util.cpu_topology import (
    CpuTopology,
)

little = pytest.mark.skipif(sys.byteorder == "big", reason="code of a little-endian machine")


@little
@pytest.mark.parametrize(
    ("instruction", "code"),
    [
        (Instruction(Op.MOVE, 7, 0), "bf07000000000000"),
        (Instruction(Op.SET, 0, value=-1), "b7000000ffffffff"),
        (Instruction(Op.ADD, 2, value=-4), "07020000fcffffff"),
        (Instruction(Op.SUBTRACT, 7, 9), "1f97000000000000"),
        (Instruction(Op.COMBINE, 8, 6), "4f68000000000000"),
        (Instruction(Op.SHIFT_LEFT, 8, value=32), "6708000020000000"),
        (Instruction(Op.SHIFT_RIGHT, 8, value=32), "7708000020000000"),
        (Instruction(Op.LOAD, 9, 0, 8), "7909080000000000"),
        (Instruction(Op.STORE, 10, 8, -16), "7b8af0ff00000000"),
        (Instruction(Op.STORE_WORD, 10, offset=-4, value=5), "620afcff05000000"),
        (Instruction(Op.ADD_ATOMICALLY, 0, 7, 0), "db70000000000000"),
        (Instruction(Op.CALL, value=LOOKUP), "8500000001000000"),
        (Instruction(Op.JUMP_UNLESS_ZERO, 9, offset=2), "5509020000000000"),
        (Instruction(Op.LEAVE), "9500000000000000"),
        (Instruction(Op.LOAD_MAP, 1, value=3), "18110000030000000000000000000000"),
    ],
)
def test_instruction_is_encoded(instruction: Instruction, code: str) -> None:
    assert assemble([instruction]).hex() == code


@little
def test_jump_counts_the_two_words_of_a_map() -> None:
    code = assemble(
        [
            Instruction(Op.JUMP_IF_ZERO, 0, jump="end"),
            Instruction(Op.LOAD_MAP, 1, value=3),
            Instruction(Op.LEAVE, label="end"),
        ]
    )
    assert code[:8].hex() == "1500020000000000"


def test_jump_to_an_unknown_label_is_an_error() -> None:
    with pytest.raises(KeyError):
        assemble([Instruction(Op.JUMP_IF_ZERO, 0, jump="nowhere")])


@pytest.mark.parametrize("count", [0, 4])
def test_program_for_socket_times_ends_in_an_exit(count: int) -> None:
    code = assemble(program(3, 4, 5, count))
    assert code[-8] == 0x95
    assert len(code) % 8 == 0


def test_program_adds_the_time_since_the_last_run_on_the_cpu() -> None:
    cpu = EbpfMachine(program(CPUS, TOTALS), 1, socket=3)
    for time, pid in ((100, 7), (150, 7), (160, 8), (200, 0), (230, 7)):
        cpu.switch(time, pid)
    assert cpu.totals() == {(7, 3): [80], (8, 3): [10]}


def running(*counts: int) -> list[tuple[int, int, int]]:
    """Readings of events that have been counted throughout."""
    return [(count, 999, 999) for count in counts]


def machine() -> EbpfMachine:
    return EbpfMachine(program(CPUS, TOTALS, EVENTS, 2), 3, socket=1)


def test_program_adds_the_counts_since_the_last_run_on_the_cpu() -> None:
    cpu = machine()
    cpu.switch(100, 7, running(1000, 50))
    cpu.switch(150, 7, running(1400, 53))
    cpu.switch(170, 0, running(1500, 60))  # of the idle task
    cpu.switch(200, 7, running(2500, 61))
    assert cpu.totals() == {(7, 1): [80, 1400, 4]}


@pytest.mark.parametrize(
    "shared", [[(1400, 40, 30), (53, 40, 40)], [(1400, 40, 40), (53, 40, 30)]], ids=["first", "2nd"]
)
def test_time_in_which_an_event_was_not_counted_is_left_out(shared: list) -> None:
    cpu = machine()
    cpu.switch(100, 7, [(1000, 20, 20), (50, 20, 20)])
    cpu.switch(150, 7, shared)
    assert cpu.totals() == {}
    cpu.switch(160, 7, [(word + 9, enabled + 5, ran + 5) for word, enabled, ran in shared])
    assert cpu.totals() == {(7, 1): [10, 9, 9]}


def test_time_around_an_event_that_cannot_be_read_is_left_out() -> None:
    cpu = machine()
    cpu.switch(100, 7, running(1000, 50))
    cpu.switch(150, 7, [(1200, 999, 999), None])
    cpu.switch(160, 7, running(1300, 51))
    assert cpu.totals() == {}
    cpu.switch(165, 7, running(1301, 51))
    assert cpu.totals() == {(7, 1): [5, 1, 0]}


def test_count_without_a_list_of_cpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="possible CPUs are unknown"):
        SocketTimes(CpuTopology(), "nonsense", tmp_path)


def test_count_in_a_pid_namespace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532459]")
    with pytest.raises(OSError, match="other pids than the kernel"):
        SocketTimes(CpuTopology(), "0", tmp_path)
