"""Owners of jobs, and the operator's word: terms, groups and GPUs that may be tuned.

Units of work of different owners never belong to one job. Service and span names are claims of the
sender; the owner is known from the kernel instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import (
    Consumer,
    DeclaredTerms,
    GroupKind,
    HwType,
    PayerInfo,
    Principal,
    TuningTerms,
)
from wattspan.model.consumers import SHORT_CONTAINER
from wattspan.ports import ProcessDirectory
from wattspan.tuning.decisions.declarations import OperatorTerms

if TYPE_CHECKING:
    from wattspan.tuning.host_view import HostView

_MAX_CACHED = 1024


class JobOwner(NamedTuple):
    """A principal, and one of its batch jobs; ``slurm`` is "" outside of a scheduler."""

    principal: Principal
    slurm: str = ""

    @property
    def label(self) -> str:
        """The owner in names of jobs."""
        user, container, pod = self.principal
        parts = (pod, "" if user is None else str(user), container[:SHORT_CONTAINER], self.slurm)
        return ".".join(filter(None, parts))


def job_owner(info: PayerInfo | None) -> JobOwner | None:
    """The owner of a process's jobs; None if the kernel proves no principal."""
    if info is None or info.principal is None:
        return None
    return JobOwner(info.principal, slurm_job(info))


def slurm_job(info: PayerInfo) -> str:
    """The batch job of a process, of Slurm or another scheduler; "" for none."""
    return next((group.name for group in info.groups if group.kind is GroupKind.JOB), "")


class ProcessOwners:
    """The owners of processes, as first seen; those of ended processes stay. For one thread."""

    def __init__(self, directory: ProcessDirectory) -> None:
        self._directory = directory
        self._known: dict[Consumer, JobOwner] = {}

    def __call__(self, consumer: Consumer) -> JobOwner | None:
        owner = self._known.get(consumer)
        if owner is None:
            owner = job_owner(self._directory.describe(consumer))
            if owner is not None:
                if len(self._known) >= _MAX_CACHED:
                    self._known.clear()
                self._known[consumer] = owner
        return owner


@dataclass(slots=True)
class TuningPermissions:
    """Jobs whose processes are in permitted groups, each named ``name`` or ``kind:name``."""

    directory: ProcessDirectory
    groups: Collection[str]
    _cache: dict[Consumer, bool] = field(default_factory=dict)

    def refusal(self, job: str, ranks: Collection[Consumer]) -> str:
        """A sentence why the job must not be tuned; "" if it may be."""
        if not self.groups:
            return ""
        outside = next((one for one in ranks if not self._is_permitted(one)), None)
        if outside is None:
            return ""
        return (
            f"{job} is not tuned: process {outside.pid} is in none of [autotune] groups "
            f"({', '.join(self.groups)})."
        )

    def _is_permitted(self, consumer: Consumer) -> bool:
        permitted = self._cache.get(consumer)
        if permitted is None:
            info = self.directory.describe(consumer)
            if info is None:
                return False
            permitted = any(
                name in self.groups or f"{kind}:{name}" in self.groups for kind, name in info.groups
            )
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[consumer] = permitted
        return permitted


class GpuVerdict(NamedTuple):
    """Permission to tune the GPUs of a job's processes, as far as it is known.

    ``refusal`` is a sentence, ``condition`` a clause while no GPU is used yet; both "" if they may.
    """

    refusal: str = ""
    condition: str = ""


class GpuPermissions:
    """GPUs of ``[autotune] gpus``. A process that has used another one stays refused.

    ``host`` returns the present view. Thread-safe.
    """

    def __init__(self, gpus: Sequence[str], host: Callable[[], HostView]) -> None:
        self._gpus, self._host = gpus, host
        self._refused: dict[Consumer, str] = {}

    def __call__(self, job: str, processes: Collection[Consumer]) -> GpuVerdict:
        """The verdict on a job of these processes and their descendants."""
        if not self._gpus:
            return GpuVerdict()
        host, listed = self._host(), f"[autotune] gpus ({', '.join(self._gpus)})"
        found = sorted(d.id for d in host.domains.values() if d.hw_type is HwType.GPU)
        refused = [one for one in found if not host.allowed(one, self._gpus)]
        if not refused:
            return GpuVerdict()
        if len(refused) == len(found):
            return GpuVerdict(f"{job} is not tuned: no GPU of this host is in {listed}.")
        used: list[str] = []
        for process in processes:
            own = host.users.used_by(host.energies.family(process), host.now.mono)
            used += [one for one in found if host.domains[one].resource in own]
            outside = next((one for one in used if one in refused), None)
            if outside is not None:
                if len(self._refused) >= _MAX_CACHED:
                    self._refused.clear()
                self._refused[process] = host.display_name(outside)
        name = next((self._refused[one] for one in processes if one in self._refused), None)
        if name is not None:
            return GpuVerdict(f"{job} uses {name}, which is not in {listed}.")
        if used:
            return GpuVerdict()
        return GpuVerdict(condition=f"a job that uses a GPU outside of {listed} is not tuned")


class JobTerms(NamedTuple):
    """The settings of one job, and those of ``[autotune]`` that apply to it.

    ``chosen``: the configuration or an application names the job; else it was detected.
    ``declared`` is None for a job that no application has declared.
    """

    host: AutotuneSettings
    job: TunedJobSettings
    chosen: bool = True
    declared: DeclaredTerms | None = None

    @property
    def mode(self) -> str:
        """The mode that the terms of a declared job give it; else that of the configuration."""
        return self.configured_mode if self.declared is None else self.declared.given.mode

    @property
    def configured_mode(self) -> str:
        return self.job.mode or self.host.mode

    @property
    def budget(self) -> float:
        """The slowdown budget of the whole job."""
        return slowdown_budget(self.host, self.job)

    @property
    def floor(self) -> int:
        """The lowest power limit of a GPU that the application accepts, in milliwatts."""
        return _milliwatts(self.declared.given.floor_watts if self.declared is not None else None)

    @property
    def first(self) -> int:
        """The power limit of a GPU to certify first, in milliwatts; 0 for none."""
        return _milliwatts(self.declared.given.first_watts if self.declared is not None else None)

    @property
    def may_apply(self) -> bool:
        """True if the configuration permits caps on the job's devices."""
        return self.mode == "apply" and (self.chosen or self.host.apply_found)


def _milliwatts(watts: float | None) -> int:
    return round(1000 * (watts or 0))


def operator_terms(
    settings: AutotuneSettings, job: TunedJobSettings | None, refusal: str = "", condition: str = ""
) -> OperatorTerms:
    """The operator's word on ``job``; None for a job that the configuration does not name."""
    mode: str = settings.mode
    if mode != "off":
        chosen = job is not None or settings.apply_found
        mode = (job.mode if job is not None else "") or (mode if chosen else "advise")
    terms = TuningTerms(
        mode,
        settings.max_slowdown if job is None else slowdown_budget(settings, job),
        settings.objective,
        settings.eta,
        settings.knobs,
    )
    named = job is not None
    return OperatorTerms(settings.declared, settings.mode, named, terms, refusal, condition)


def slowdown_budget(settings: AutotuneSettings, job: TunedJobSettings) -> float:
    return settings.max_slowdown if job.max_slowdown is None else job.max_slowdown
