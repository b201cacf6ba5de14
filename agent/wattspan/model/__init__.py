"""The words of wattspan, as values.

Energy is a whole number of microjoules, power a whole number of milliwatts, time a whole number
of nanoseconds. Everything here is immutable, knows no clock and does no I/O. ``None`` always
means *unknown*; zero is a measurement.
"""

from wattspan.model.accounts import (
    AgentStats,
    DomainAccount,
    Exemplar,
    GroupRow,
    Opening,
    ProcessRow,
    Snapshot,
    SpanAccounts,
    SpanRow,
)
from wattspan.model.conditions import (
    Failure,
    GpuStatus,
    PowerLimits,
    SourceHealth,
    Trouble,
)
from wattspan.model.consumers import (
    Attribution,
    Consumer,
    Group,
    GroupKind,
    IdlePolicy,
    Payer,
    PayerInfo,
    Remainder,
    Share,
    Usage,
)
from wattspan.model.domains import (
    Domain,
    Gap,
    GapReason,
    HwType,
    Interval,
    Provenance,
    Reading,
)
from wattspan.model.quantities import (
    MILLISECOND,
    SECOND,
    Instant,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    Word,
    energy_at,
    mean_power,
)

__all__ = [
    "MILLISECOND",
    "SECOND",
    "AgentStats",
    "Attribution",
    "Consumer",
    "Domain",
    "DomainAccount",
    "Exemplar",
    "Failure",
    "Gap",
    "GapReason",
    "GpuStatus",
    "Group",
    "GroupKind",
    "GroupRow",
    "HwType",
    "IdlePolicy",
    "Instant",
    "Interval",
    "Microjoules",
    "Milliwatts",
    "Nanoseconds",
    "Opening",
    "Payer",
    "PayerInfo",
    "PowerLimits",
    "ProcessRow",
    "Provenance",
    "Reading",
    "Remainder",
    "Share",
    "Snapshot",
    "SourceHealth",
    "SpanAccounts",
    "SpanRow",
    "Trouble",
    "Usage",
    "Word",
    "energy_at",
    "mean_power",
]
