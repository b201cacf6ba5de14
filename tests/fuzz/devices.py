"""Responses of a GPU driver: strings, counts and numbers that no GPU has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
from testbed.fake_nvml import FakeGpu, FakeNvml
from testbed.nvml_bench import Bench

from fuzz.registry import target
from fuzz.supply import Supply, one_line

_CODES = (1, 2, 3, 4, 6, 7, 9, 10, 13, 15, 16, 18, 27, 28, 999, 12345)


def _number(supply: Supply) -> int:
    """Values in the library's C types: 64 bits without a sign."""
    return abs(supply.number()) % 2**64


class HostileNvml(FakeNvml):
    """Answers as scripted, until the input has it answer otherwise."""

    def __init__(self, honest: FakeNvml, supply: Supply) -> None:
        super().__init__(honest.clock, *honest.gpus)
        self._supply = supply

    def __getattr__(self, name: str) -> Any:
        honest = super().__getattr__(name)

        def call(*arguments: Any) -> Any:
            return self._twisted(honest(*arguments))

        return call

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        count = self._twisted(super().nvmlDeviceGetCount())
        return count if isinstance(count, int) else 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        if index >= len(self.gpus):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return super().nvmlDeviceGetHandleByIndex(index)

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return str(self._twisted(super().nvmlSystemGetDriverVersion()))

    def _twisted(self, answer: Any) -> Any:
        supply = self._supply
        kind = supply.byte()
        if kind < 160:
            return answer
        if kind < 176:
            raise pynvml.NVMLError(supply.pick(_CODES))
        match answer:
            case bool() | int():
                return _number(supply)
            case str():
                return supply.text()
            case list() if answer and isinstance(answer[0], int):
                return [_number(supply) for _ in answer]
            case list():
                return [self._changed(one) for one in answer] * (1 + kind % 4)
            case SimpleNamespace():
                return self._changed(answer)
        return answer

    def _changed(self, answer: Any) -> Any:
        names = {name: value for name, value in vars(answer).items() if isinstance(value, int)}
        changed = {name: _number(self._supply) for name in names}
        return SimpleNamespace(**{**vars(answer), **changed})


@target(
    "nvml",
    whose="the GPU driver, or a library in its place",
    holds="a cycle never raises; energy, power and shares stay within their bounds",
    watched=("wattspan.sources",),
    samples=(bytes(40), b"\xb4" * 8 + bytes(20), bytes(range(150, 250))),
    words=(b"\xff\xff", b"\xa5", b"\xc0\x3f", b"\xe0\xff\xff\xff\xff\xff\xff\xff\xff"),
)
def nvml(data: bytes) -> None:
    supply = Supply(data)
    bench = Bench(FakeGpu("GPU-a"), FakeGpu("GPU-b"))
    bench.nvml.sample(bench.gpu, 100, 50)
    bench.gpu.running.append(100)
    hostile = HostileNvml(bench.nvml, supply)
    bench.session.vendor.library.binding = hostile
    for _ in range(12):
        bench.clock.advance(0.1)
        batch = bench.turn()
        ids = {domain.id for domain in batch.domains}
        assert len(ids) == len(batch.domains) <= 64
        assert {reading.domain_id for reading in batch.readings} <= ids
        for reading in batch.readings:
            assert 0 <= reading.counter < 2**96
        for failure in batch.failures:
            one_line(str(failure), 2000)
        for usage in batch.usages:
            assert all(spent >= 0 for spent in usage.spent.values())
            assert usage.unclaimed >= 0
        for domain in batch.domains:
            one_line(domain.name, 300)
    bench.session.close()
