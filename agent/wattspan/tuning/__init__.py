"""The tuner: which setting saves the most, and how it is known to keep the budget.

Pure: no clock, no I/O. ``begin`` makes the state of one knob of one job, ``step`` takes it from
one observation to the next and decides, ``report`` says where it stands.
"""

from wattspan.tuning.state import State
from wattspan.tuning.step import begin, step
from wattspan.tuning.telling import remember, report
from wattspan.tuning.values import (
    EnergyPoint,
    Fingerprint,
    Kind,
    Objective,
    Observation,
    Policy,
    Range,
    Remembered,
    Report,
    Unit,
)

__all__ = [
    "EnergyPoint",
    "Fingerprint",
    "Kind",
    "Objective",
    "Observation",
    "Policy",
    "Range",
    "Remembered",
    "Report",
    "State",
    "Unit",
    "begin",
    "remember",
    "report",
    "step",
]
