"""What is wanted of each knob, by tuners, operator and budget; and so what is to stand on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from wattspan.capper.journal import JournalEntry
from wattspan.capper.leases import CapGrant, Lease, LeaseRegistry
from wattspan.capper.limits import CapBounds, OperatorLimits, cap_bounds, limit_step
from wattspan.capper.writer import LimitWriter, WriteCause
from wattspan.model import CapKey, KnobState
from wattspan.util.peer_credentials import PeerCredentials

_NO_LIMITS: Mapping[CapKey, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ImposedLimits:
    """What holds without a lease: the operator's ``fixed`` caps, and each device's share.

    ``limit`` is the budget of which the ``shares`` are, in milliwatts; ``short`` is by how much
    it cannot be kept, for devices take their minimum at least.
    """

    fixed: Mapping[CapKey, int] = field(default_factory=lambda: _NO_LIMITS)
    shares: Mapping[CapKey, int] = field(default_factory=lambda: _NO_LIMITS)
    limit: int | None = None
    short: int = 0


UNKNOWN_PEER = PeerCredentials()
_NOTHING_IMPOSED = ImposedLimits()


class CapResolver:
    """Every wish, and the least of them for each knob. Nothing here touches a device."""

    def __init__(self, writer: LimitWriter, rules: OperatorLimits, longest: int) -> None:
        self.leases = LeaseRegistry(longest)
        self.peers: dict[int, PeerCredentials] = {}
        self.asked_for = _NOTHING_IMPOSED
        self.suspended = False
        """Whether nothing is to be set any more, for everything was asked back."""
        self.rules = rules
        """What the operator allows; it holds from the next look at a knob on."""
        self._writer = writer

    @property
    def imposed(self) -> ImposedLimits:
        return _NOTHING_IMPOSED if self.suspended else self.asked_for

    def keys(self) -> set[CapKey]:
        """Every knob that anybody wants a cap on."""
        wanted = self.leases.held() | {*self.imposed.fixed, *self.imposed.shares}
        return {key for key in wanted if key in self._writer.devices.states}

    def tuned(self, key: CapKey) -> tuple[int, Lease, CapGrant] | None:
        """Which tuner holds ``key``."""
        return self.leases.holding(key)

    def one_step(self, key: CapKey, value: int) -> int:
        """What is granted of a tuner's wish: within bounds, and not too far down at once."""
        state = self.ranged(self._writer.devices.states[key])
        allowed = self._bounds(state, tuned=True)
        if allowed is None:
            return value
        return limit_step(state, self.present(state), allowed.clamp(value), self.rules)

    def target(self, state: KnobState) -> int | None:
        """What is to stand on a knob that is as ``state`` says; None for the original."""
        state = self.ranged(state)
        tuned, static = self._bounds(state, tuned=True), self._bounds(state, tuned=False)
        if tuned is None or static is None:
            return None
        wishes = []
        if (held := self.tuned(state.key)) is not None:
            wishes.append(tuned.clamp(held[2].caps[state.key]))
        imposed = self._imposed_on(state, static)
        wishes += [limit_step(state, self.present(state), value, self.rules) for value in imposed]
        least = min(wishes, default=static.highest)
        return None if least >= static.highest else least

    def imposed_limit(self, state: KnobState) -> int | None:
        """The limit that remains on a knob without any lease; None for the original."""
        state = self.ranged(state)
        static = self._bounds(state, tuned=False)
        if static is None:
            return None
        least = min(self._imposed_on(state, static), default=static.highest)
        return None if least >= static.highest else least

    def cause(self, key: CapKey) -> WriteCause:
        """On whose behalf a cap on ``key`` is set."""
        if (held := self.tuned(key)) is not None:
            return self.cause_of(held[0], held[2])
        fixed, share = self.imposed.fixed.get(key), self.imposed.shares.get(key)
        if fixed is not None and (share is None or fixed <= share):
            return WriteCause("operator", "fixed by [caps] fixed")
        if share is not None:
            return WriteCause("budget", "its share of the host's power budget")
        return WriteCause()

    def cause_of(self, holder: int, grant: CapGrant) -> WriteCause:
        peer = self.peers.get(holder, UNKNOWN_PEER)
        return WriteCause(grant.job, grant.why, peer.pid, peer.uid)

    def present(self, state: KnobState) -> int | None:
        """What stands on a knob, as far as moves are counted from it."""
        entry = self._entry(state)
        if entry is not None and entry.written and not entry.left_alone:
            return entry.value
        return state.requested if state.requested is not None else state.maximum

    def ranged(self, state: KnobState) -> KnobState:
        """With the range that was found before we wrote: some drivers derive it from the limit."""
        entry = self._entry(state)
        if entry is None:
            return state
        return replace(state, minimum=entry.minimum, default=entry.default, maximum=entry.maximum)

    def _imposed_on(self, state: KnobState, allowed: CapBounds) -> list[int]:
        limits = (self.imposed.fixed, self.imposed.shares)
        return [allowed.clamp(limit[state.key]) for limit in limits if state.key in limit]

    def _bounds(self, state: KnobState, *, tuned: bool) -> CapBounds | None:
        entry = self._entry(state)
        original = state.requested if entry is None else entry.original
        return cap_bounds(state, original, self.rules, tuned=tuned)

    def _entry(self, state: KnobState) -> JournalEntry | None:
        return self._writer.entries.get(state.key)
