"""The energy counter and the power sensor of an emulated board, in whole numbers.

Power is piecewise constant: a *segment* has a beginning and a power in milliwatts, so energy is
an exact sum of milliwatts times nanoseconds, which are picojoules.

The published power-limit curves that come with wattspan; their origin is beside them.

The GPU boards that can be emulated: limits, sensors, counters, and where each came from.

Limits, idle and burn powers of the H100 and H200 are from captures of real boards; sensor
windows are those measured by Yang et al. (SC '24, arXiv 2312.02741). The shape of P(f) is a
model everywhere: fitted to published sweeps for V100 and A40, assumed for the rest.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from wattspan.emulation.physics import CurvePoint, PublishedCurve, Silicon

PICOJOULES = 1_000_000  # in a microjoule


class PowerSegment(NamedTuple):
    """``power`` milliwatts from ``start`` to ``end``, nanoseconds of the monotonic clock."""

    start: int
    end: int
    power: int


PowerHistory = tuple[PowerSegment, ...]


def extended(history: PowerHistory, segment: PowerSegment, keep: int) -> PowerHistory:
    """``history`` with ``segment`` at its end, without what ended ``keep`` ns before that end."""
    if segment.end <= segment.start:
        return history
    if history and history[-1].power == segment.power and history[-1].end == segment.start:
        history, segment = history[:-1], PowerSegment(history[-1].start, segment.end, segment.power)
    cut = 0
    while cut < len(history) and history[cut].end <= segment.end - keep:
        cut += 1
    return (*history[cut:], segment)


def mean_power(history: PowerHistory, start: int, end: int) -> int | None:
    """The mean power between two times in milliwatts; None where nothing is remembered.

    Before the history begins the board is taken to have drawn what it first drew.
    """
    if not history or end <= start:
        return None
    energy = sum(
        max(0, min(end, part.end) - max(start, part.start)) * part.power for part in history
    )
    missing = max(0, min(end, history[0].start) - start)
    return (energy + missing * history[0].power) // (end - start)


def last_edge(born: int, period: int, now: int) -> int:
    """The latest time not after ``now`` that lies whole periods after ``born``."""
    return born + (now - born) // period * period


def picojoules(power: int, duration: int) -> int:
    """The exact energy of ``power`` milliwatts over ``duration`` nanoseconds."""
    return power * duration


_ORIGIN = "published measurement, ml-energy/zeus (NSDI '23), Apache-2.0"


@cache
def published_curves() -> dict[tuple[str, str], PublishedCurve]:
    """Every published curve by GPU ("A40", "V100") and workload ("bert", "resnet50", ...)."""
    points: dict[tuple[str, str], list[CurvePoint]] = {}
    text = files("wattspan.emulation").joinpath("curves", "power_limit.csv").read_text("utf-8")
    for row in csv.DictReader(text.splitlines()):
        point = CurvePoint(
            round(float(row["limit_w"]) * 1000),
            round(float(row["mean_power_w"]) * 1000),
            float(row["time_ratio"]),
        )
        points.setdefault((row["gpu"], row["workload"]), []).append(point)
    return {key: PublishedCurve(tuple(sorted(found)), _ORIGIN) for key, found in points.items()}


def published_curve(gpu: str, workload: str) -> PublishedCurve:
    """The curve of one workload on one GPU; KeyError names those there are."""
    curves = published_curves()
    if (gpu, workload) not in curves:
        known = ", ".join(f"{a} {b}" for a, b in sorted(curves))
        raise KeyError(f"no published curve for {gpu} {workload}; there are: {known}")
    return curves[gpu, workload]


_GIB = 1 << 30
_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class PowerSensor:
    """How a board measures its power. Times in nanoseconds; ``None``: it has no such reading.

    Every ``period`` it publishes the mean of the last ``window``; ``gain_ppm`` is its error.
    """

    period: int
    instant_window: int
    average_window: int | None
    usage_is_average: bool  # which of the two nvmlDeviceGetPowerUsage returns
    gain_ppm: int = 0


@dataclass(frozen=True, slots=True)
class EmulatedBoard:
    """One kind of GPU board. Power in milliwatts, memory in bytes, time in nanoseconds."""

    key: str
    name: str  # what NVML says, and third-party clients parse
    architecture: int  # NVML_DEVICE_ARCH_*
    compute: tuple[int, int]
    brand: int  # NVML_BRAND_*
    pci_device: int
    multiprocessors: int
    memory: int
    reserved_memory: int
    limits: tuple[int, int, int]  # minimum, default, maximum
    silicon: Silicon
    memory_mhz: int
    sensor: PowerSensor
    counter_step: int | None = 100 * _MS  # None: there is no energy counter
    sample_period: int = 166_666_667  # utilisation samples
    cap_latency: int = 50 * _MS  # no authoritative figure exists: a parameter
    basis: str = "model"  # where P(f) comes from


_HOPPER = PowerSensor(100 * _MS, 25 * _MS, 1000 * _MS, usage_is_average=True)
_AMPERE = PowerSensor(100 * _MS, 100 * _MS, 1000 * _MS, usage_is_average=True)
_VOLTA = PowerSensor(20 * _MS, 10 * _MS, None, usage_is_average=False)
_FITTED = "model fitted to published power-limit sweeps (ml-energy/zeus)"
_ASSUMED = "model: limits, idle and burn power captured on real boards, shape assumed"

H100 = EmulatedBoard(
    key="h100",
    name="NVIDIA H100 80GB HBM3",
    architecture=9,
    compute=(9, 0),
    brand=14,
    pci_device=0x2330_10DE,
    multiprocessors=132,
    memory=80 * _GIB,
    reserved_memory=_GIB // 2,
    limits=(200_000, 700_000, 700_000),
    silicon=Silicon(70_000, 110_000, 519_000, 345, 1980, knee=0.6, flat_voltage=0.8),
    memory_mhz=2619,
    sensor=_HOPPER,
    basis=_ASSUMED,
)
H200 = EmulatedBoard(
    key="h200",
    name="NVIDIA H200",
    architecture=9,
    compute=(9, 0),
    brand=14,
    pci_device=0x2335_10DE,
    multiprocessors=132,
    memory=141 * _GIB,
    reserved_memory=_GIB // 2,
    limits=(200_000, 700_000, 700_000),
    silicon=Silicon(78_000, 120_000, 507_000, 345, 1980, knee=0.6, flat_voltage=0.8),
    memory_mhz=3201,
    sensor=_HOPPER,
    basis=_ASSUMED,
)
A40 = EmulatedBoard(
    key="a40",
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
    basis=_FITTED,
)
V100 = EmulatedBoard(
    key="v100",
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
    basis=_FITTED,
)
P100 = EmulatedBoard(  # Pascal: power, but no energy counter
    key="p100",
    name="Tesla P100-PCIE-16GB",
    architecture=4,
    compute=(6, 0),
    brand=2,
    pci_device=0x15F8_10DE,
    multiprocessors=56,
    memory=16 * _GIB,
    reserved_memory=_GIB // 4,
    limits=(125_000, 250_000, 250_000),
    silicon=Silicon(28_000, 50_000, 190_000, 544, 1324, knee=0.75, flat_voltage=0.86),
    memory_mhz=715,
    sensor=_VOLTA,
    counter_step=None,
    basis="model: limits captured, shape assumed",
)

BOARDS = {board.key: board for board in (H100, H200, A40, V100, P100)}
