"""The operator's word on jobs: their terms, and the groups whose processes may be tuned."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from wattspan.config import AutotuneSettings, TunedJobSettings
from wattspan.model import Consumer, DeclaredTerms, TuningTerms
from wattspan.ports import ProcessDirectory
from wattspan.tuning.decisions.declarations import OperatorTerms

_MAX_CACHED = 1024


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


class JobTerms(NamedTuple):
    """The settings of one job, and those of ``[autotune]`` that apply to it.

    ``job`` is None for a detected job, ``declared`` for one that no application has declared.
    """

    host: AutotuneSettings
    job: TunedJobSettings | None = None
    declared: DeclaredTerms | None = None

    @property
    def mode(self) -> str:
        """The mode that the terms of a declared job give it; else that of the configuration."""
        return self.configured_mode if self.declared is None else self.declared.given.mode

    @property
    def configured_mode(self) -> str:
        return (self.job.mode if self.job is not None else "") or self.host.mode

    @property
    def may_apply(self) -> bool:
        """True if the configuration permits caps on the job's devices."""
        chosen = self.job is not None or self.host.apply_found
        return self.mode == "apply" and chosen


def operator_terms(
    settings: AutotuneSettings, job: TunedJobSettings | None, refusal: str = ""
) -> OperatorTerms:
    """The operator's word on ``job``; None for a job that the configuration does not name."""
    mode: str = settings.mode
    if mode != "off":
        named = job is not None or settings.apply_found
        mode = (job.mode if job is not None else "") or (mode if named else "advise")
    terms = TuningTerms(
        mode,
        settings.max_slowdown if job is None else slowdown_budget(settings, job),
        settings.objective,
        settings.eta,
        settings.knobs,
    )
    return OperatorTerms(settings.declared, settings.mode, job is not None, terms, refusal)


def slowdown_budget(settings: AutotuneSettings, job: TunedJobSettings) -> float:
    return settings.max_slowdown if job.max_slowdown is None else job.max_slowdown
