"""Programs are the machine code of the kernel's instruction set."""

import sys
from pathlib import Path

import pytest

from wattspan.processes.cpu_socket_times import (
    LOOKUP,
    Instruction,
    Op,
    SocketTimes,
    assemble,
    program,
)
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


def test_program_for_socket_times_ends_in_an_exit() -> None:
    code = assemble(program(3, 4))
    assert code[-8] == 0x95
    assert len(code) % 8 == 0


def test_count_without_a_list_of_cpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="possible CPUs are unknown"):
        SocketTimes(CpuTopology(), "nonsense", tmp_path)


def test_count_in_a_pid_namespace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532459]")
    with pytest.raises(OSError, match="other pids than the kernel"):
        SocketTimes(CpuTopology(), "0", tmp_path)
