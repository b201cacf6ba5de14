"""One CPU that runs an eBPF program: its registers, its memory, and the kernel's helpers."""

from collections.abc import Sequence
from itertools import count

from wattspan.processes.ebpf import (
    LOOKUP,
    MONOTONIC_TIME,
    PID_AND_GROUP,
    READ_PERF_EVENT,
    UPDATE,
    Instruction,
    Op,
)

CPUS, TOTALS, EVENTS = 1, 2, 3  # descriptors of the maps
STACK, CPU, VALUES = 0x1000, 0x2000, 0x3000  # addresses
WORDS = 2**64
_INVALID = WORDS - 22


class EbpfMachine:
    """Runs the program for socket times; a value has ``words``, a CPU four and its counts."""

    def __init__(self, program: Sequence[Instruction], words: int, socket: int) -> None:
        self._program, self._words = program, words
        self._labels = {one.label: at for at, one in enumerate(program) if one.label}
        self._memory = {CPU + 8 * at: 0 for at in range(4 + words)} | {CPU + 8: socket}
        self._places: dict[int, int] = {}  # addresses of values by key
        self._free = count(VALUES, 8 * words)

    def totals(self) -> dict[tuple[int, int], list[int]]:
        """The values by process and socket."""
        return {
            (key >> 32, key & 0xFFFFFFFF): [self._memory[at + 8 * n] for n in range(self._words)]
            for key, at in self._places.items()
        }

    def switch(
        self, time: int, pid: int, events: Sequence[tuple[int, int, int] | None] = ()
    ) -> None:
        """Run at ``time`` after ``pid``; ``events`` are the readings, None of one that fails."""
        memory, registers = self._memory, [0xDEAD] * 11
        registers[10], at = STACK, 0
        while True:
            code, target, source, offset, value, jump, _ = self._program[at]
            at += 1
            there = registers[target] + offset
            match code:
                case Op.LEAVE:
                    return
                case Op.CALL:
                    registers[0] = self._call(value, registers, time, pid, events)
                    registers[1:6] = [0xDEAD] * 5
                case Op.JUMP_IF_ZERO | Op.JUMP_UNLESS_ZERO:
                    if (registers[target] == 0) is (code is Op.JUMP_IF_ZERO):
                        at = self._labels[jump]
                case Op.LOAD:
                    registers[target] = memory[registers[source] + offset]
                case Op.STORE:
                    memory[there] = registers[source]
                case Op.STORE_WORD:
                    memory[there] = value
                case Op.ADD_ATOMICALLY:
                    memory[there] = (memory[there] + registers[source]) % WORDS
                case _:
                    before, other = registers[target], registers[source]
                    registers[target] = {
                        Op.LOAD_MAP: value,
                        Op.SET: value,
                        Op.MOVE: other,
                        Op.ADD: before + value,
                        Op.SUBTRACT: before - other,
                        Op.COMBINE: before | other,
                        Op.SHIFT_LEFT: before << (value % 64),
                        Op.SHIFT_RIGHT: before >> (value % 64),
                    }[code] % WORDS

    def _call(
        self,
        helper: int,
        registers: Sequence[int],
        time: int,
        pid: int,
        events: Sequence[tuple[int, int, int] | None],
    ) -> int:
        memory, (first, second, third) = self._memory, registers[1:4]
        match helper:
            case _ if helper == MONOTONIC_TIME:
                return time
            case _ if helper == PID_AND_GROUP:
                return pid << 32 | pid
            case _ if helper == LOOKUP:
                return CPU if first == CPUS else self._places.get(memory[second], 0)
            case _ if helper == UPDATE:
                place = self._places[memory[second]] = next(self._free)
                memory.update((place + 8 * n, memory[third + 8 * n]) for n in range(self._words))
                return 0
        assert (helper, first) == (READ_PERF_EVENT, EVENTS)
        if (reading := events[second]) is None:
            return _INVALID
        memory.update((third + 8 * n, word) for n, word in enumerate(reading))
        return 0
