"""The values of wattspan, which all parts of the agent share.

Energy is a whole number of microjoules, power a whole number of milliwatts, time a whole number
of nanoseconds. All values are immutable; this package uses no clock and does no I/O. ``None``
means *unknown*; zero is a measurement.
"""

from wattspan.model.consumers import Attribution as Attribution
from wattspan.model.consumers import Consumer as Consumer
from wattspan.model.consumers import Group as Group
from wattspan.model.consumers import GroupKind as GroupKind
from wattspan.model.consumers import IdlePolicy as IdlePolicy
from wattspan.model.consumers import NamePolicy as NamePolicy
from wattspan.model.consumers import Payer as Payer
from wattspan.model.consumers import PayerInfo as PayerInfo
from wattspan.model.consumers import Remainder as Remainder
from wattspan.model.consumers import Share as Share
from wattspan.model.consumers import Tick as Tick
from wattspan.model.consumers import Usage as Usage
from wattspan.model.measurements import MILLISECOND as MILLISECOND
from wattspan.model.measurements import SECOND as SECOND
from wattspan.model.measurements import Domain as Domain
from wattspan.model.measurements import Gap as Gap
from wattspan.model.measurements import GapReason as GapReason
from wattspan.model.measurements import HwType as HwType
from wattspan.model.measurements import Instant as Instant
from wattspan.model.measurements import Interval as Interval
from wattspan.model.measurements import Microjoules as Microjoules
from wattspan.model.measurements import Milliwatts as Milliwatts
from wattspan.model.measurements import ModelEnum as ModelEnum
from wattspan.model.measurements import Nanoseconds as Nanoseconds
from wattspan.model.measurements import Provenance as Provenance
from wattspan.model.measurements import Reading as Reading
from wattspan.model.measurements import energy_at as energy_at
from wattspan.model.measurements import mean_power as mean_power
from wattspan.model.snapshot import MAX_RATE as MAX_RATE
from wattspan.model.snapshot import AgentStats as AgentStats
from wattspan.model.snapshot import BaselineQuality as BaselineQuality
from wattspan.model.snapshot import Checkpoint as Checkpoint
from wattspan.model.snapshot import DomainAccount as DomainAccount
from wattspan.model.snapshot import Exemplar as Exemplar
from wattspan.model.snapshot import Failure as Failure
from wattspan.model.snapshot import Footprint as Footprint
from wattspan.model.snapshot import GpuStatus as GpuStatus
from wattspan.model.snapshot import GroupRow as GroupRow
from wattspan.model.snapshot import PowerLimits as PowerLimits
from wattspan.model.snapshot import ProcessRow as ProcessRow
from wattspan.model.snapshot import RatedEnergy as RatedEnergy
from wattspan.model.snapshot import RateOrigin as RateOrigin
from wattspan.model.snapshot import Snapshot as Snapshot
from wattspan.model.snapshot import SourceHealth as SourceHealth
from wattspan.model.snapshot import SpanAccounts as SpanAccounts
from wattspan.model.snapshot import SpanRow as SpanRow
from wattspan.model.snapshot import Trouble as Trouble
from wattspan.model.tuning import CapKey as CapKey
from wattspan.model.tuning import CapRow as CapRow
from wattspan.model.tuning import Decision as Decision
from wattspan.model.tuning import DecisionReason as DecisionReason
from wattspan.model.tuning import Knob as Knob
from wattspan.model.tuning import KnobState as KnobState
from wattspan.model.tuning import Move as Move
from wattspan.model.tuning import RecordedDecision as RecordedDecision
from wattspan.model.tuning import SettingResult as SettingResult
from wattspan.model.tuning import TuningAccounts as TuningAccounts
from wattspan.model.tuning import TuningFigures as TuningFigures
from wattspan.model.tuning import TuningRow as TuningRow
from wattspan.model.tuning import TuningState as TuningState
