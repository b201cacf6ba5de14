"""The Python API of a study: its frontier and recommendations."""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from pathlib import Path

from wattspan.frontier.estimates import SettingEstimates
from wattspan.frontier.pareto import frontier
from wattspan.frontier.recommendation import (
    DEFAULT_TOLERANCE,
    Constraints,
    Recommendation,
    recommend,
)
from wattspan.frontier.settings import Setting
from wattspan.frontier.trials import Study, StudyFile


class Frontier:
    """The measured settings of a command, from the file of ``wattspan frontier run``."""

    def __init__(self, study: Study) -> None:
        self.study = study

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Frontier:
        """The study in the file at ``path``; StudyFileError."""
        return cls(StudyFile(Path(path)).read())

    @cached_property
    def estimates(self) -> SettingEstimates:
        """Time and energy of the settings with usable trials."""
        return SettingEstimates(self.study.settings, self.study.usable())

    @property
    def settings(self) -> list[Setting]:
        """The settings of the frontier, the fastest first."""
        return [self.study.settings[number] for number in frontier(self.estimates)]

    def recommend(
        self,
        *,
        max_slowdown: float | None = None,
        deadline: float | None = None,
        energy_budget: float | None = None,
        watts: float | None = None,
        eta: float | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
    ) -> Recommendation:
        """The best setting that keeps the constraints with confidence; see Constraints for them.

        NoSettingError if there is none, ValueError for an invalid constraint.
        """
        constraints = Constraints(
            max_slowdown=max_slowdown,
            deadline=deadline,
            energy_budget=energy_budget,
            watts=watts,
            eta=eta,
            max_watts=None if eta is None else self._max_watts(),
            tolerance=tolerance,
        )
        return recommend(self.estimates, constraints)

    def _max_watts(self) -> float:
        """The sum of the devices' original limits, which weighs time in Zeus's cost."""
        limits = [device.original_watts for device in self.study.devices]
        known = [limit for limit in limits if limit is not None]
        if len(known) < len(limits):
            raise ValueError("eta needs the power limits of all devices, and some are unknown.")
        return sum(known)
