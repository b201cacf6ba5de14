"""Assembly of the host's part in a fleet."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from wattspan.model import HwType, Snapshot
from wattspan.model.snapshot import FleetAccounts
from wattspan.service.agent import ServiceGroup
from wattspan.service.tuning_assembly import AgentCore, TuningAssembly

if TYPE_CHECKING:
    from wattspan.fleet.participant import FleetParticipant

_CAPPER_TIMEOUT = 3.0
"""Seconds of one call to the capper, within which it writes all limits."""
_LIMITED_TYPES = (HwType.GPU, HwType.CPU)


@dataclass(slots=True)
class FleetAssembly:
    """The participant in a fleet, if one is configured; ``services`` are not started yet."""

    core: AgentCore
    tuning: TuningAssembly
    boot_id: str
    services: ServiceGroup = field(default_factory=lambda: ServiceGroup("fleet"))
    _participant: FleetParticipant | None = None

    def __post_init__(self) -> None:
        config, clock = self.core.config, self.core.clock
        if not config.fleet.is_enabled:
            return
        # Most hosts are in no fleet: its TLS and HTTP take memory.
        from wattspan.fleet.etcd import EtcdCoordination
        from wattspan.fleet.member import FleetMember, SessionRecord
        from wattspan.fleet.participant import FleetParticipant

        coordination = EtcdCoordination(config.fleet, clock)
        record = SessionRecord(Path(config.agent.state_dir), self.boot_id)
        reserve = config.caps.reserve_watts * 1000
        member = FleetMember(
            config.fleet.name_of(self.core.view().host),
            config.fleet,
            coordination,
            self.tuning.capper_client(_CAPPER_TIMEOUT),
            clock,
            power=lambda: limited_power(self.core.view(), reserve),
            new_session=lambda: secrets.token_hex(8),
            former_session=record.former,
            note_session=record.note,
            ramp=config.caps.ramp_watts_per_second * 1000,
            largest_step=config.caps.largest_step,
        )
        participant = FleetParticipant(config.fleet, coordination, member, clock, self.core.log)
        self._participant = participant
        self.services.add(participant.start, participant.stop)
        self.services.health_checks.append(participant.health)

    def accounts(self) -> FleetAccounts | None:
        """The newest state; None without a fleet. Safe from any thread."""
        return None if self._participant is None else self._participant.status


def limited_power(snapshot: Snapshot, reserve: int) -> int | None:
    """The power of all devices that can be limited, and the reserve, in milliwatts.

    None if there are none, or if the power of one is unknown.
    """
    powers = [
        account.power
        for account in snapshot.cover
        if account.present and account.domain.hw_type in _LIMITED_TYPES
    ]
    if not powers or None in powers:
        return None
    return reserve + sum(power for power in powers if power is not None)
