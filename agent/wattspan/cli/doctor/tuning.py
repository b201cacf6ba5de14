"""Checks of tuning: knobs of the devices, the capper, and limits left by an earlier capper."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from wattspan.capper.host_directory import HostDirectory, capper_directory
from wattspan.capper.journal import EntrySource, JournalEntry, boot_ids, read_journal
from wattspan.capper.planner import is_power_knob, unmatched_settings
from wattspan.capper.protocol import (
    TIMEOUT,
    CapperClient,
    StateReply,
    cap_row,
    capper_start_command,
    has_capper_unit,
)
from wattspan.cli.caps import capper_state
from wattspan.cli.doctor import Finding, Severity, declared, note, ok, warning
from wattspan.cli.doctor.host import capabilities
from wattspan.cli.tune.text import setting_text
from wattspan.config import Config
from wattspan.config.settings import ineffective_settings
from wattspan.model import CapKey, CapRow, DecisionReason, Domain, HwType, Knob, KnobState, Trouble
from wattspan.ports import Actuator, ActuatorError, CapsError, SourceContext
from wattspan.sdk import MeasurementError
from wattspan.service.configuration import ask_agent, capper_client
from wattspan.sources.hwmon.sensors import NAME as HWMON
from wattspan.util.text import printable

_CAPABILITY = "CAP_SYS_ADMIN"
_NO_KNOB_REASONS = {
    Knob.GPU_POWER: "no GPU here has a power limit that can be read",
    Knob.GPU_CLOCK: "no GPU here has clocks that can be locked",
    Knob.CPU_POWER: "no CPU package here has a long-term power limit",
}


def examine_tuning(
    config: Config, context: SourceContext, domains: Collection[Domain] = (), root: Path = Path("/")
) -> Iterator[Finding]:
    """Read knobs and the capper's state, for the measured ``domains``; nothing is written."""
    host = None if context.emulated else HostDirectory(Path(config.caps.host_dir))
    capper = CapperProbe.configured(config, context)
    place = capper_directory(Path(config.agent.state_dir), emulated=context.emulated)
    left = [] if capper.answers else list(unrestored_limits(place, root))
    yield _mode(config)
    found = {knob: list(knob_states(knob, context, domains)) for knob in Knob}
    yield from _knobs(config, found, capper.rows)
    yield from _unmatched(config, found, domains)
    yield from _jobs_without_units(config)
    if host is not None and (fault := host.fault()):
        yield warning("host directory", fault)
    yield examine_capper(
        config,
        capper,
        root,
        held=host.holder_text if host is not None else "",
        by_systemd=has_capper_unit(root) and not context.emulated,
        left=any(finding.mark is Severity.FAIL for finding in left),
    )
    yield from left


def _mode(config: Config) -> Finding:
    tuned = config.autotune
    if tuned.mode == "off":
        return declared("tuning-off")
    jobs = ", ".join(filter(None, (job.service or job.span for job in tuned.job)))
    named = f"for {jobs}" if jobs else "no job is named"
    budget = f"{100 * tuned.max_slowdown:.4g}% slower at most"
    if tuned.mode == "apply" and not jobs and not tuned.apply_found:
        return declared("tuning-of-nothing", budget=budget, named=named)
    return ok("tuning", f"{tuned.mode}, {budget}, {named}")


# --------------------------------------------------------------------------------------- knobs


def _knobs(
    config: Config,
    found: Mapping[Knob, Sequence[KnobState | ActuatorError]],
    known: Mapping[CapKey, CapRow],
) -> Iterator[Finding]:
    """A finding for each knob of each device, or for a knob that no device has."""
    caps = config.caps
    budget = bool(caps.budget_watts or caps.budget_file or config.fleet.is_enabled)
    for knob, states in found.items():
        tuned = knob in config.autotune.knobs
        budgeted = budget and is_power_knob(knob)
        missing = warning if tuned and config.autotune.mode != "off" else note
        if not states:
            yield missing(knob.value, _NO_KNOB_REASONS[knob])
        fixed = [one.device for one in caps.fixed if one.knob is knob]
        for state in states:
            if isinstance(state, ActuatorError):
                yield missing(knob.value, str(state))
            else:
                chosen = tuned or budgeted or state.is_named(fixed)
                yield _knob(state, known.get(state.key), chosen=chosen)


def _unmatched(
    config: Config,
    found: Mapping[Knob, Sequence[KnobState | ActuatorError]],
    domains: Collection[Domain],
) -> Iterator[Finding]:
    """Settings that match nothing, and devices that a budget cannot limit."""
    states = [one for states in found.values() for one in states if isinstance(one, KnobState)]
    tunable = config.autotune.gpus if config.autotune.mode != "off" else ()
    for sentence in ineffective_settings(config):
        yield warning("settings", sentence)
    for sentence in unmatched_settings(config.caps, states, tunable):
        yield warning("settings", sentence, "Correct or remove it.")
    limits = (one for one in states if is_power_knob(one.key.knob) and one.requested is not None)
    limited = {state.key.device for state in limits}
    if (config.caps.budget_watts or config.caps.budget_file) and limited:
        free = [one.name for one in domains if one.in_cover and not _is_limited(one, limited)]
        if free:
            yield declared("budget-without-limit", devices=", ".join(free))


def _is_limited(domain: Domain, limited: Collection[str]) -> bool:
    """True for a device with a power limit, and for memory, which has none of its own."""
    return domain.id in limited or domain.hw_type not in (HwType.CPU, HwType.GPU)


def _jobs_without_units(config: Config) -> Iterator[Finding]:
    """Configured jobs for which the running agent has received no unit of work."""
    if not config.autotune.job or config.autotune.mode == "off":
        return
    try:
        facts = ask_agent(config, "/v1/tuning")
    except MeasurementError:
        return
    for row in facts.get("jobs", ()):
        decision = row.get("decision", {})
        if decision.get("reason") == DecisionReason.NO_SIGNAL and not row.get("declared"):
            yield warning("tuned job", f"{row['job']}: {decision['sentence']}")


def _knob(state: KnobState, row: CapRow | None, *, chosen: bool) -> Finding:
    knob = state.key.knob
    what = f"{knob} {state.name}"
    settings = [("now", state.requested), ("at least", state.minimum), ("at most", state.maximum)]
    if state.enforced != state.requested:
        settings.append(("enforced", state.enforced))
    detail = ", ".join(
        f"{setting_text(knob, value)} {name}" for name, value in settings if value is not None
    )
    if row is not None and not row.usable:
        return (warning if chosen else note)(what, f"{detail}; {row.trouble}")
    if row is not None and row.foreign:
        detail += "; another program has set it, so it is left unchanged"
        return declared("knob-foreign", what=what, detail=detail)
    if row is not None and row.holder:
        detail += f"; held by {row.holder}"
    return ok(what, detail) if chosen else declared("knob-unused", what=what, detail=detail)


def knob_states(
    knob: Knob, context: SourceContext, domains: Collection[Domain]
) -> Iterator[KnobState | ActuatorError]:
    """The state of each device's knob, or the error of reading it."""
    from wattspan.capper.workers import SYSFS, open_actuators

    kind = HwType.CPU if knob is Knob.CPU_POWER else HwType.GPU
    opened = open_actuators(
        {knob},
        clock=context.clock,
        nvml=context.nvml,
        sysfs=context.sysfs or SYSFS,
        emulated=context.emulated,
        amdsmi=context.amdsmi,
    )
    try:
        readable = {state.key.device: state for one in opened for state in one.devices()}
        yield from readable.values()
        for domain in domains:
            if domain.id in readable or _is_instance(domain):
                continue  # one limit holds for all MIG instances of a board
            if domain.hw_type is kind and domain.source == HWMON:
                if domain.in_cover:
                    yield _sensor_only(knob, domain)
            elif domain.hw_type is kind and opened:
                state = _state_of(domain.id, opened)
                absent = isinstance(state, ActuatorError) and state.trouble is Trouble.ABSENT
                if not absent or kind is HwType.GPU:
                    yield state
    finally:
        for actuator in opened:
            actuator.close()


def _sensor_only(knob: Knob, domain: Domain) -> ActuatorError:
    """The reason for which a device that only a sensor of hwmon measures has no knob."""
    from wattspan.capper.actuators import actuator_error

    thing = f"set the {knob} of {domain.name}"
    cause = "a sensor measures it, and no library or file of its driver sets it"
    return actuator_error(thing, cause, "", Trouble.ABSENT)


def _state_of(device: str, actuators: Sequence[Actuator]) -> KnobState | ActuatorError:
    """The state of the knob of a device, or the most telling error of several actuators."""
    from wattspan.capper.devices import most_telling

    errors = []
    for actuator in actuators:
        try:
            return actuator.read(device)
        except ActuatorError as error:
            errors.append(error)
    return most_telling(errors)


def _is_instance(domain: Domain) -> bool:
    return domain.hw_type is HwType.GPU and domain.parent is not None


# -------------------------------------------------------------------------------------- capper


class CapperProbe:
    """The state of the running capper, if one answers."""

    def __init__(self, client: CapperClient) -> None:
        self.rows: dict[CapKey, CapRow] = {}
        self.error = CapsError("")
        self.state: StateReply | None = None
        try:
            self.state = capper_state(client)
            self.rows = {row.state.key: row for row in map(cap_row, self.state.rows)}
        except CapsError as error:
            self.error = error
        self.path = client.address.path
        self.shared = self.answers and client.address.shared
        """True if it is the capper of another agent of this host."""

    @classmethod
    def configured(cls, config: Config, context: SourceContext) -> CapperProbe:
        """The capper of this host, or of an emulated one."""
        emulated = True if context.emulated else None
        who = "wattspan doctor"
        return cls(capper_client(config, context.clock, who, timeout=TIMEOUT, emulated=emulated))

    @property
    def answers(self) -> bool:
        return self.state is not None or bool(self.error.refusal)


def examine_capper(
    config: Config, capper: CapperProbe, root: Path, *, held: str, by_systemd: bool, left: bool
) -> Finding:
    """``by_systemd``: a unit starts it; ``left``: an earlier one has left limits in force.

    ``held`` names the process with the lock of the host's capper, "" if none has it.
    """
    state = capper.state
    whose = ", the capper of another agent of this host" if capper.shared else ""
    if capper.error.refusal:
        there = " in the configuration of that agent" if capper.shared else ""
        return declared(
            "capper-refuses", path=capper.path, whose=whose, error=capper.error, there=there
        )
    if state is None:
        if held:
            return declared("capper-held", path=capper.path, held=held)
        return _silent_capper(config, capper, root, by_systemd=by_systemd, left=left)
    answers = f"answers at {capper.path} (pid {state.pid}){whose}"
    if capper.shared and config.caps.imposes:
        return declared("capper-of-other-agent", answers=answers)
    if state.suspended:  # by `wattspan caps restore`, until it is restarted
        anew = "Restart the capper, or the agent that started it,"
        if by_systemd:
            anew = "Run `systemctl restart wattspan-capper` as root"
        return declared("capper-suspended", answers=answers, anew=anew)
    count = sum(bool(row.holder) for row in capper.rows.values())
    return ok("capper", f"{answers}; {count} cap{' is' if count == 1 else 's are'} held")


def _silent_capper(
    config: Config, capper: CapperProbe, root: Path, *, by_systemd: bool, left: bool
) -> Finding:
    """No capper answers: whether one is needed, and whether the agent would start one."""
    caps = config.caps
    wanted = config.autotune.mode == "apply" or caps.imposes or config.fleet.is_enabled
    may = os.geteuid() == 0 or _CAPABILITY in capabilities(root)
    why = f"none at {capper.path}"
    if capper.path.exists():
        why = printable(str(capper.error)).partition(". ")[0]
    start = f"Run `{capper_start_command(root)}` as root"
    if left:
        return declared(
            "capper-ended-and-needed" if wanted else "capper-ended", why=why, start=start
        )
    if not wanted:
        return declared("capper-unneeded", why=why)
    if caps.capper == "auto" and may and by_systemd:
        return declared("capper-of-service", why=why, start=start)
    if caps.capper is True or (caps.capper == "auto" and may):
        missing = "" if may else f", which lacks {_CAPABILITY}"
        detail = f"{why}; the agent starts one as this user{missing}"
        return (ok if may else warning)("capper", detail)
    return declared("capper-without-right", why=why, capability=_CAPABILITY, start=start)


# ------------------------------------------------------------------------------ left limits


def unrestored_limits(place: Path, root: Path) -> Iterator[Finding]:
    """A journal of this boot without a capper: the limits in it may still be in force.

    Entries of an earlier boot say nothing before a capper compares them with the devices.
    """
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return
    # The boot of an emulated host also has its name.
    journals = [
        read_journal(place, one) for one in boot_ids(place) if boot and one.startswith(boot)
    ]
    if damaged := {str(path) for found in journals for path in found.damaged}:
        yield declared("journal-damaged", paths=", ".join(sorted(damaged)))
        return
    entries = [
        entry
        for found in journals
        for entry in found.entries.values()
        if entry.source is not EntrySource.EARLIER
    ]
    if imposed := _entry_names(entry for entry in entries if entry.imposed is not None):
        yield declared("limits-imposed", imposed=imposed, place=place)
    if names := _entry_names(entry for entry in entries if entry.imposed is None):
        yield declared("limits-left", names=names, place=place)


def _entry_names(entries: Iterable[JournalEntry]) -> str:
    return ", ".join(f"{entry.knob} of {entry.name or entry.device}" for entry in entries)
