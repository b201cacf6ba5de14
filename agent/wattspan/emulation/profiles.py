"""The hosts that can be emulated, by name: what hardware they have, and what runs in a demo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from wattspan.emulation.gpu_work import Resident, Serving, Training, Work
from wattspan.emulation.powercap_law import CpuLaw
from wattspan.ports import ConfigError


@dataclass(frozen=True, slots=True)
class Job:
    """A real process of the demo: how busy it keeps one CPU, and its work on each GPU.

    Its CPU time is real; its GPU time exists on the emulated boards only.
    """

    name: str
    duty: float  # of one CPU, 0..1
    cpu: int | None = None  # pinned there, as training jobs are
    gpus: Mapping[int, Work] = field(default_factory=dict)
    memory: int = 4 << 30  # bytes on each of its GPUs
    spans: Literal["", "steps", "requests"] = ""  # what it tells of its work on its first GPU


@dataclass(frozen=True, slots=True)
class HostProfile:
    """An emulated host: a powercap layout with its law, GPU boards, and the jobs of a demo."""

    name: str
    about: str
    powercap: str | None
    law: CpuLaw = field(default_factory=CpuLaw)
    gpus: tuple[str, ...] = ()
    jobs: tuple[Job, ...] = ()


_SERVER = CpuLaw(package_idle=62_000, package_active=11_000, dram_idle=7_000, dram_active=1_800)
_LAPTOP = CpuLaw(package_idle=3_000, package_active=6_000, dram_idle=800, dram_active=500)

_TRAINER = Job(
    "trainer",
    duty=0.30,
    cpu=0,
    gpus={0: Training(step=0.6, host=0.12, noise=0.03, seed=1)},
    memory=61 << 30,
    spans="steps",
)
_SERVER_JOB = Job(
    "server",
    duty=0.12,
    cpu=1,
    gpus={1: Serving(rate=6.0, cost=0.06, burst=3.0, seed=2), 0: Resident()},
    memory=9 << 30,
    spans="requests",
)


def _trainer(seed: int, memory: int) -> Job:
    work = Training(step=0.5, noise=0.03, seed=seed)
    return Job("trainer", 0.3, 0, {0: work}, memory, "steps")


PROFILES: Mapping[str, HostProfile] = {
    profile.name: profile
    for profile in (
        HostProfile(
            "two-socket-h100",
            "two-socket server, memory counters, two H100-class GPUs",
            "xeon-2s",
            _SERVER,
            ("h100", "h100"),
            (_TRAINER, _SERVER_JOB),
        ),
        HostProfile(
            "two-socket",
            "two-socket server, memory counters, no GPU",
            "xeon-2s",
            _SERVER,
            jobs=(Job("batch", 0.4, 0), Job("web", 0.1, 1)),
        ),
        HostProfile(
            "one-socket-h100",
            "one-socket server, memory counter, one H100-class GPU",
            "xeon-1s",
            _SERVER,
            ("h100",),
            (_TRAINER,),
        ),
        HostProfile(
            "epyc-a40",
            "two-socket AMD server, no memory counters, one A40",
            "epyc-2s",
            _SERVER,
            ("a40",),
            (_trainer(seed=3, memory=20 << 30),),
        ),
        HostProfile(
            "wrapping",
            "two-socket server whose counters wrap every minute or so, two GPUs",
            "wrapping",
            _SERVER,
            ("h100", "h100"),
            (_TRAINER, _SERVER_JOB),
        ),
        HostProfile(
            "laptop",
            "client processor with psys, core and uncore counters",
            "client",
            _LAPTOP,
            jobs=(Job("browser", 0.2), Job("compile", 0.4)),
        ),
        HostProfile(
            "old-gpu",
            "a P100, which has no energy counter: energy is integrated from power",
            "xeon-2s",
            _SERVER,
            ("p100",),
            (_trainer(seed=4, memory=4 << 30),),
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
