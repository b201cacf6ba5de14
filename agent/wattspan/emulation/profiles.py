"""Emulated hosts by name: their hardware and the jobs of a demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from wattspan.emulation.boards import H100, MI300X, EmulatedBoard, Kernel
from wattspan.emulation.powercap_engine import CpuLaw
from wattspan.emulation.powercap_tree import (
    LAYOUTS,
    NO_COUNTERS,
    CounterScope,
    EmulatedMeter,
    PowercapLayout,
)
from wattspan.emulation.workloads import (
    DECODE,
    LARGE_MODEL,
    PREFILL,
    TRAIN,
    GpuWork,
    RequestServing,
    SteadyLoad,
    Training,
)
from wattspan.ports import ConfigError

KERNELS: Mapping[str, Kernel] = {
    "train": TRAIN,
    "decode": DECODE,
    "prefill": PREFILL,
    "large-model": LARGE_MODEL,
}


@dataclass(frozen=True, slots=True)
class DemoJob:
    """A real process of the demo: its load of one CPU and its work on each GPU.

    Its CPU time is real; its GPU time exists on the emulated boards only. ``work`` is that of a
    job without a GPU, as fast as the CPUs of its socket.
    """

    name: str
    duty: float  # of one CPU, 0..1
    cpu: int | None = None  # pinned there, as training jobs are
    gpus: Mapping[int, GpuWork] = field(default_factory=dict)
    memory: int = 4 << 30  # bytes on each of its GPUs
    spans: Literal["", "steps", "requests"] = ""  # of the work on its first GPU
    work: GpuWork | None = None
    instance: int | None = None  # the number of its MIG instance, from 1


@dataclass(frozen=True, slots=True)
class HostProfile:
    """An emulated host: CPU counters or power meters with their law, boards, and a demo's jobs."""

    name: str
    about: str
    powercap: PowercapLayout
    law: CpuLaw = field(default_factory=CpuLaw)
    gpus: tuple[EmulatedBoard, ...] = ()
    jobs: tuple[DemoJob, ...] = ()
    meters: tuple[EmulatedMeter, ...] = ()
    instances: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Compute slices of the MIG instances, by the index of the GPU."""


_SERVER = CpuLaw(package_idle=62_000, package_active=11_000, dram_idle=7_000, dram_active=1_800)
_LAPTOP = CpuLaw(package_idle=3_000, package_active=6_000, dram_idle=800, dram_active=500)

_BATCH = CpuLaw(package_idle=55_000, package_active=150_000, dram_idle=7_000, dram_active=1_800)
"""Each of this machine's CPUs represents many of the emulated package's."""

_GRACE = CpuLaw(package_idle=65_000, package_active=60_000)
_GRACE_METERS = (
    EmulatedMeter("Grace Power Socket 0", CounterScope("package")),
    EmulatedMeter("CPU Power Socket 0", CounterScope("core")),
    EmulatedMeter("SysIO Power Socket 0", CounterScope("uncore")),
)

_TRAINER = DemoJob(
    "trainer",
    duty=0.25,
    cpu=0,
    gpus={0: Training(step=0.12, host=0.03, noise=0.03, seed=1, kernel=LARGE_MODEL)},
    memory=61 << 30,
    spans="steps",
)
_SERVER_JOB = DemoJob(
    "server",
    duty=0.12,
    cpu=1,
    gpus={1: RequestServing(rate=6.0, cost=0.06, burst=3.0, seed=2), 0: SteadyLoad(0.0)},
    memory=9 << 30,
    spans="requests",
)


def _mig_job(name: str, load: float, instance: int) -> DemoJob:
    """A job with a steady load of its MIG instance."""
    return DemoJob(name, duty=0.05, gpus={0: SteadyLoad(load)}, memory=6 << 30, instance=instance)


PROFILES: Mapping[str, HostProfile] = {
    profile.name: profile
    for profile in (
        HostProfile(
            "two-socket-h100",
            "two-socket server, memory counters, two H100-class GPUs",
            LAYOUTS["xeon-2s"],
            _SERVER,
            (H100, H100),
            (_TRAINER, _SERVER_JOB),
        ),
        HostProfile(
            "two-socket",
            "two-socket server, memory counters, no GPU",
            LAYOUTS["xeon-2s"],
            _SERVER,
            jobs=(DemoJob("batch", 0.4, 0), DemoJob("web", 0.1, 1)),
        ),
        HostProfile(
            "one-socket-h100",
            "one-socket server, memory counter, one H100-class GPU",
            LAYOUTS["xeon-1s"],
            _SERVER,
            (H100,),
            (_TRAINER,),
        ),
        HostProfile(
            "grace-hopper",
            "ARM superchip: power meters instead of CPU counters, one H100-class GPU",
            NO_COUNTERS,
            _GRACE,
            (H100,),
            (_TRAINER,),
            _GRACE_METERS,
        ),
        HostProfile(
            "four-h100",
            "two-socket server, memory counters, four H100-class GPUs, no jobs",
            LAYOUTS["xeon-2s"],
            _SERVER,
            (H100, H100, H100, H100),
        ),
        HostProfile(
            "mi300x-8",
            "two-socket server, memory counters, eight MI300X-class GPUs",
            LAYOUTS["xeon-2s"],
            _SERVER,
            (MI300X,) * 8,
            (_TRAINER, _SERVER_JOB),
        ),
        HostProfile(
            "h100-mi300x",
            "two-socket server, memory counters, one H100-class and one MI300X-class GPU",
            LAYOUTS["xeon-2s"],
            _SERVER,
            (H100, MI300X),
            (_TRAINER, _SERVER_JOB),
        ),
        HostProfile(
            "h100-mig",
            "one-socket server, one H100-class GPU in MIG instances of 3, 2, 1 and 1 slices",
            LAYOUTS["xeon-1s"],
            _SERVER,
            (H100,),
            (
                DemoJob(
                    "trainer",
                    duty=0.25,
                    cpu=0,
                    gpus={0: Training(step=0.12, host=0.03, noise=0.03, seed=1)},
                    memory=30 << 30,
                    spans="steps",
                    instance=1,
                ),
                _mig_job("tuner", 0.55, instance=2),
                _mig_job("notebook", 0.15, instance=3),
                _mig_job("resident", 0.0, instance=4),
            ),
            instances={0: (3, 2, 1, 1)},
        ),
        HostProfile(
            "laptop",
            "client processor with psys, core and uncore counters",
            LAYOUTS["client"],
            _LAPTOP,
            jobs=(DemoJob("browser", 0.2), DemoJob("compile", 0.4)),
        ),
        HostProfile(
            "batch",
            "one-socket server without a GPU, with a CPU-bound job that its power limit can slow",
            LAYOUTS["xeon-1s"],
            _BATCH,
            jobs=(DemoJob("cruncher", 0.9, 0, spans="steps", work=Training(0.1, 0.5, 0.02, 6)),),
        ),
    )
}


def profile_named(name: str) -> HostProfile:
    """The profile called ``name``; the error names those there are."""
    profile = PROFILES.get(name)
    if profile is None:
        raise ConfigError(
            f"There is no emulated host {name!r}. Choose one of: {', '.join(PROFILES)}."
        )
    return profile
