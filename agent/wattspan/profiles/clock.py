"""The payer's CPU time, as far as it was sampled: the course of its energy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

_SAMPLES = 2048  # of the CPU clock, at least the newest so many


class CpuClock:
    """The payer's CPU time, sampled: a function that only rises, linear between samples."""

    def __init__(self) -> None:
        self._mono: list[int] = []
        self._cpu: list[int] = []

    def add(self, mono: int, cpu: int) -> None:
        if self._mono and mono <= self._mono[-1]:
            return
        self._mono.append(mono)
        self._cpu.append(max(cpu, self._cpu[-1]) if self._cpu else cpu)
        if len(self._mono) > 2 * _SAMPLES:
            del self._mono[:_SAMPLES], self._cpu[:_SAMPLES]

    def reaches(self, time: int) -> bool:
        """Whether anything is known of the time after ``time``."""
        return bool(self._mono) and self._mono[-1] > time

    def course(self, start: int, end: int) -> tuple[list[int], list[int]] | None:
        """Times from ``start`` to ``end`` and the clock at each.

        Where samples end inside the stretch, the rest is taken to go on at their mean rate. None
        where nothing is known, or the clock stood still.
        """
        mono, cpu = self._mono, self._cpu
        first, beyond = bisect_right(mono, start), bisect_left(mono, end)
        low, high = max(0, first - 1), min(beyond, len(mono) - 1)
        if first == len(mono) or beyond == 0 or cpu[high] == cpu[low]:
            return None
        elapsed, spent = mono[high] - mono[low], cpu[high] - cpu[low]

        def at(time: int, left: int) -> int:
            if 0 <= left < len(mono) - 1:
                part, whole = time - mono[left], mono[left + 1] - mono[left]
                return cpu[left] + (cpu[left + 1] - cpu[left]) * part // whole
            known = max(left, 0)
            return cpu[known] + spent * (time - mono[known]) // elapsed

        begin, stop = at(start, first - 1), at(end, beyond - 1)
        if stop == begin:
            return None
        return [start, *mono[first:beyond], end], [begin, *cpu[first:beyond], stop]
