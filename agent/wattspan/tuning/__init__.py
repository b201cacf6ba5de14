"""The tuner: which setting saves the most, and how it is known to keep the budget.

Pure: no clock, no I/O. ``begin`` makes the state of one knob of one job, ``step`` takes it from
one observation to the next and decides, ``report`` says where it stands.
"""

from wattspan.tuning.decisions.report import certified_levels, report
from wattspan.tuning.decisions.search import TunerState
from wattspan.tuning.decisions.step import begin, step
from wattspan.tuning.decisions.values import (
    CertifiedLevels,
    EnergyPoint,
    Fingerprint,
    KnobRange,
    Objective,
    Observation,
    TunerPolicy,
    TunerReport,
    WorkloadKind,
    WorkUnit,
)

__all__ = [
    "CertifiedLevels",
    "EnergyPoint",
    "Fingerprint",
    "KnobRange",
    "Objective",
    "Observation",
    "TunerPolicy",
    "TunerReport",
    "TunerState",
    "WorkUnit",
    "WorkloadKind",
    "begin",
    "certified_levels",
    "report",
    "step",
]
