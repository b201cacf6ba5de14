"""Assembly of the host's part in a fleet."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from wattspan.model import HwType, Snapshot
from wattspan.model.snapshot import FleetAccounts
from wattspan.service.agent import ServiceGroup
from wattspan.service.tuning_assembly import AgentCore, TuningAssembly

_CAPPER_TIMEOUT = 3.0
"""Seconds of one call to the capper, within which it writes all limits."""
_LIMITED_TYPES = (HwType.GPU, HwType.CPU)


def add_fleet(
    services: ServiceGroup, core: AgentCore, tuning: TuningAssembly, boot_id: str
) -> Callable[[], FleetAccounts | None]:
    """Add the participant in the fleet, if one is configured, to ``services``.

    Returns its newest state; None without a fleet. Safe from any thread.
    """
    config, clock = core.config, core.clock
    if not config.fleet.is_enabled:
        return lambda: None
    # Most hosts are in no fleet: its TLS and HTTP take memory.
    from wattspan.fleet.etcd import EtcdCoordination
    from wattspan.fleet.member import FleetMember, SessionRecord
    from wattspan.fleet.participant import FleetParticipant

    coordination = EtcdCoordination(config.fleet, clock)
    record = SessionRecord(Path(config.agent.state_dir), boot_id)
    reserve = config.caps.reserve_watts * 1000
    member = FleetMember(
        config.fleet.name_of(core.view().host),
        config.fleet,
        coordination,
        tuning.capper_client(_CAPPER_TIMEOUT),
        clock,
        power=lambda: limited_power(core.view(), reserve),
        new_session=lambda: secrets.token_hex(8),
        former_session=record.former,
        note_session=record.note,
        ramp=config.caps.ramp_watts_per_second * 1000,
        largest_step=config.caps.largest_step,
    )
    participant = FleetParticipant(config.fleet, coordination, member, clock, core.log)
    services.add(participant.start, participant.stop)
    services.health_checks.append(participant.health)
    return lambda: participant.status


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
