"""Further GPU boards to emulate, with other sensors, counters and limits than those of the demo.

Limits, idle and burn power of the H200 are from captures of real boards. The shape of P(f) is
fitted to published sweeps (``tests/fixtures/power_limit.csv``) for V100 and A40, assumed for the
rest.
"""

from __future__ import annotations

from dataclasses import replace

from wattspan.emulation.boards import H100, EmulatedBoard, PowerSensor, Silicon

_GIB = 1 << 30
_MS = 1_000_000
_AMPERE = PowerSensor(100 * _MS, 100 * _MS, 1000 * _MS, usage_is_average=True)
_VOLTA = PowerSensor(20 * _MS, 10 * _MS, None, usage_is_average=False)

H200 = replace(
    H100,
    name="NVIDIA H200",
    pci_device=0x2335_10DE,
    memory=141 * _GIB,
    silicon=Silicon(78_000, 120_000, 507_000, 345, 1980, knee=0.6, flat_voltage=0.8),
    memory_mhz=3201,
)
A40 = EmulatedBoard(
    name="NVIDIA A40",
    architecture=7,
    compute=(8, 6),
    brand=14,
    pci_device=0x2235_10DE,
    multiprocessors=84,
    memory=48 * _GIB,
    reserved_memory=_GIB // 2,
    limits=(100_000, 300_000, 300_000),
    silicon=Silicon(30_000, 64_000, 240_000, 210, 1740, knee=0.87, flat_voltage=0.90),
    memory_mhz=7251,
    sensor=_AMPERE,
    counter_step=20 * _MS,
)
V100 = EmulatedBoard(
    name="Tesla V100-PCIE-16GB",
    architecture=5,
    compute=(7, 0),
    brand=2,
    pci_device=0x1DB4_10DE,
    multiprocessors=80,
    memory=16 * _GIB,
    reserved_memory=_GIB // 4,
    limits=(100_000, 250_000, 250_000),
    silicon=Silicon(26_000, 47_000, 195_000, 135, 1380, knee=0.75, flat_voltage=0.86),
    memory_mhz=877,
    sensor=_VOLTA,
    counter_step=20 * _MS,
)
P100 = replace(  # Pascal: power, but no energy counter
    V100,
    name="Tesla P100-PCIE-16GB",
    architecture=4,
    compute=(6, 0),
    pci_device=0x15F8_10DE,
    multiprocessors=56,
    limits=(125_000, 250_000, 250_000),
    silicon=Silicon(28_000, 50_000, 190_000, 544, 1324, knee=0.75, flat_voltage=0.86),
    memory_mhz=715,
    counter_step=None,
)

BOARDS = {"h100": H100, "h200": H200, "a40": A40, "v100": V100, "p100": P100}
