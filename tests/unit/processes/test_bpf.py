"""Programs are the machine code of the kernel's instruction set."""

import sys

import pytest

from wattspan.processes import bpf
from wattspan.processes.cpu_socket_times import SocketTimes, program
from wattspan.processes.cpus import CpuTopology

little = pytest.mark.skipif(sys.byteorder == "big", reason="code of a little-endian machine")


@little
@pytest.mark.parametrize(
    ("instruction", "code"),
    [
        (bpf.move(7, 0), "bf07000000000000"),
        (bpf.set_to(0, -1), "b7000000ffffffff"),
        (bpf.add(2, -4), "07020000fcffffff"),
        (bpf.subtract(7, 9), "1f97000000000000"),
        (bpf.combine(8, 6), "4f68000000000000"),
        (bpf.shift_left(8, 32), "6708000020000000"),
        (bpf.shift_right(8, 32), "7708000020000000"),
        (bpf.load(9, 0, 8), "7909080000000000"),
        (bpf.store(10, -16, 8), "7b8af0ff00000000"),
        (bpf.store_word(10, -4, 5), "620afcff05000000"),
        (bpf.add_atomically(0, 0, 7), "db70000000000000"),
        (bpf.call(bpf.LOOKUP), "8500000001000000"),
        (bpf.leave(), "9500000000000000"),
        (bpf.load_map(1, 3), "18110000030000000000000000000000"),
    ],
)
def test_instruction_is_encoded(instruction: bpf.Instruction, code: str) -> None:
    assert bpf.assemble([instruction]).hex() == code


@little
def test_jump_counts_the_two_words_of_a_map() -> None:
    code = bpf.assemble([bpf.jump_if_zero(0, "end"), bpf.load_map(1, 3), bpf.leave(label="end")])
    assert code[:8].hex() == "1500020000000000"


def test_jump_to_an_unknown_label_is_an_error() -> None:
    with pytest.raises(KeyError):
        bpf.assemble([bpf.jump_if_zero(0, "nowhere")])


def test_program_for_socket_times_ends_in_an_exit() -> None:
    code = bpf.assemble(program(3, 4))
    assert code[-8] == 0x95
    assert len(code) % 8 == 0


def test_count_without_a_list_of_cpus_is_refused() -> None:
    with pytest.raises(OSError, match="possible CPUs are unknown"):
        SocketTimes(CpuTopology(), "nonsense")
