"""Checks of tuning: knobs of the devices, the capper, and limits left by an earlier capper."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from wattspan.capper.journal_entries import EntrySource, JournalEntry, boot_ids, read_journal
from wattspan.capper.paths import capper_directory
from wattspan.cli.doctor.findings import DiagnosisSection, Finding, Severity
from wattspan.cli.doctor.host import capabilities
from wattspan.cli.tune.text import setting_text
from wattspan.config import Config
from wattspan.model import CapKey, CapRow, Domain, HwType, Knob, KnobState, Trouble
from wattspan.ports import ActuatorError, CapsError, Clock, SourceContext
from wattspan.service.configuration import capper_socket
from wattspan.util.text import printable

_CAPABILITY = "CAP_SYS_ADMIN"
_NO_KNOB_REASONS = {
    Knob.GPU_POWER: "no GPU here has a power limit that can be read",
    Knob.GPU_CLOCK: "no GPU here has clocks that can be locked",
    Knob.CPU_POWER: "no CPU package here has a long-term power limit",
}


def examine_tuning(
    config: Config,
    context: SourceContext,
    domains: Collection[Domain] = (),
    root: Path = Path("/"),
) -> DiagnosisSection:
    """Read knobs and the capper's state, for the measured ``domains``; nothing is written."""
    capper = _CapperProbe(config, context.clock, emulated=context.emulated)
    findings = [_mode(config)]
    findings += _knobs(config, context, domains, capper.rows)
    place = capper_directory(Path(config.agent.state_dir), emulated=context.emulated)
    left = list(_unrestored_limits(place, root, answers=capper.answers))
    findings.append(capper.finding(root, left=any(one.mark is Severity.FAIL for one in left)))
    findings += left
    return DiagnosisSection("Tuning and caps", tuple(findings))


def _mode(config: Config) -> Finding:
    tuned = config.autotune
    if tuned.mode == "off":
        return Finding(
            Severity.NOTE,
            "tuning",
            'off: [autotune] mode = "off"',
            'Set mode = "advise" for advice, or "apply" to apply it.',
        )
    jobs = ", ".join(filter(None, (job.service or job.span for job in tuned.job)))
    named = f"for {jobs}" if jobs else "no job is named"
    budget = f"{100 * tuned.max_slowdown:.4g}% slower at most"
    if tuned.mode == "apply" and not jobs and not tuned.apply_found:
        return Finding(
            Severity.WARN,
            "tuning",
            f"apply, {budget}, but {named}, so no limit is written",
            "Name a job in [[autotune.job]], or set apply_found = true.",
        )
    return Finding(Severity.OK, "tuning", f"{tuned.mode}, {budget}, {named}")


# --------------------------------------------------------------------------------------- knobs


def _knobs(
    config: Config,
    context: SourceContext,
    domains: Collection[Domain],
    known: Mapping[CapKey, CapRow],
) -> Iterator[Finding]:
    """A finding for each knob of each device, or for a knob that no device has."""
    for knob in Knob:
        found = list(_states(knob, context, domains))
        chosen = knob in config.autotune.knobs
        wanted = chosen and config.autotune.mode != "off"
        if not found:
            mark = Severity.WARN if wanted else Severity.NOTE
            yield Finding(mark, knob.value, _NO_KNOB_REASONS[knob])
        for state in found:
            if isinstance(state, ActuatorError):
                mark = Severity.WARN if wanted else Severity.NOTE
                yield Finding(mark, knob.value, str(state))
            else:
                row = known.get(state.key)
                yield _knob(state, row, chosen=chosen)


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
        return Finding(Severity.WARN if chosen else Severity.NOTE, what, f"{detail}; {row.trouble}")
    if row is not None and row.foreign:
        detail += "; another program has set it, so it is left unchanged"
        return Finding(Severity.WARN, what, detail, "See `wattspan caps status`.")
    if row is not None and row.holder:
        detail += f"; held by {row.holder}"
    if not chosen:
        detail += "; not in [autotune] knobs"
    return Finding(Severity.OK if chosen else Severity.NOTE, what, detail)


def _states(
    knob: Knob, context: SourceContext, domains: Collection[Domain]
) -> Iterator[KnobState | ActuatorError]:
    """The state of each device's knob, or the error of reading it."""
    from wattspan.capper.actuators import SYSFS, open_actuators

    kind = HwType.CPU if knob is Knob.CPU_POWER else HwType.GPU
    for actuator in open_actuators(
        {knob},
        clock=context.clock,
        nvml=context.nvml,
        sysfs=context.sysfs or SYSFS,
        emulated=context.emulated,
    ):
        try:
            readable = {state.key.device: state for state in actuator.devices()}
            yield from readable.values()
            for domain in domains:
                if domain.hw_type is kind and domain.id not in readable:
                    try:
                        yield actuator.read(domain.id)
                    except ActuatorError as error:
                        if error.trouble is not Trouble.ABSENT or kind is HwType.GPU:
                            yield error
        finally:
            actuator.close()


# -------------------------------------------------------------------------------------- capper


class _CapperProbe:
    """The state of the running capper, if one answers."""

    def __init__(self, config: Config, clock: Clock, *, emulated: bool) -> None:
        from wattspan.capper.client import CapperClient

        self._config, self._emulated = config, emulated
        self._path = capper_socket(config)
        self.rows: dict[CapKey, CapRow] = {}
        self.answers, self._error, self._pid = False, "", 0
        self._refusal, self._suspended = "", False
        client = CapperClient(self._path, clock, who="wattspan doctor")
        try:
            self.rows = {row.state.key: row for row in client.rows()}
            self.answers = True
            if client.state is not None:
                self._pid, self._suspended = client.state.pid, client.state.suspended
        except CapsError as error:
            self._error, self._refusal = str(error), error.refusal
            self.answers = bool(error.refusal)
        finally:
            client.close()

    def finding(self, root: Path, *, left: bool) -> Finding:
        """``left``: an earlier capper has left limits in force."""
        if self._refusal:
            return Finding(
                Severity.WARN,
                "capper",
                f"answers at {self._path} and refuses: {self._error}",
                "Name this user in [caps] users, and restart the capper.",
            )
        if self._suspended:
            return self._doing_nothing(root)
        if self.answers:
            held = sum(bool(row.holder) for row in self.rows.values())
            count = f"{held} cap is held" if held == 1 else f"{held} caps are held"
            return Finding(
                Severity.OK, "capper", f"answers at {self._path} (pid {self._pid}); {count}"
            )
        return self._silent(root, left=left)

    def _doing_nothing(self, root: Path) -> Finding:
        """`wattspan caps restore` suspends the capper until it is restarted."""
        from wattspan.capper.client import has_capper_unit

        by_systemd = has_capper_unit(root) and not self._emulated
        anew = "Run `systemctl restart wattspan-capper` as root"
        if not by_systemd:
            anew = "Restart the capper, or the agent that started it,"
        return Finding(
            Severity.WARN,
            "capper",
            f"answers at {self._path} (pid {self._pid}); `wattspan caps restore` has restored"
            " all limits, so no budget or fixed cap is in force, and no job is tuned",
            f"{anew} to set limits again.",
        )

    def _silent(self, root: Path, *, left: bool) -> Finding:
        """No capper answers: whether one is needed, and whether the agent would start one."""
        from wattspan.capper.client import capper_start_command, has_capper_unit

        caps, tuned = self._config.caps, self._config.autotune
        wanted = tuned.mode == "apply" or bool(caps.fixed or caps.budget_watts or caps.budget_file)
        may = os.geteuid() == 0 or _CAPABILITY in capabilities(root)
        why = f"none at {self._path}"
        if self._path.exists():
            why = printable(self._error).partition(". ")[0]
        start = capper_start_command(root)
        if left:
            remedy = f"Run `{start}` as root to set limits again." if wanted else ""
            detail = f"{why}, and an earlier one has ended without restoring its limits"
            return Finding(Severity.WARN, "capper", detail, remedy)
        if not wanted:
            return Finding(
                Severity.NOTE, "capper", f"{why}; none is needed, because no cap is configured"
            )
        if caps.capper == "auto" and may and has_capper_unit(root) and not self._emulated:
            remedy = f"Run `{start}` as root; the service's agent starts none."
            return Finding(Severity.WARN, "capper", why, remedy)
        if caps.capper is True or (caps.capper == "auto" and may):
            missing = "" if may else f", which lacks {_CAPABILITY}"
            mark = Severity.OK if may else Severity.WARN
            return Finding(mark, "capper", f"{why}; the agent starts one as this user{missing}")
        return Finding(
            Severity.WARN,
            "capper",
            f"{why}, and this user has no right to write limits ({_CAPABILITY} is missing)",
            f"Run `{start}` as root; until then the tuner only advises.",
        )


# ------------------------------------------------------------------------------ left limits


def _unrestored_limits(place: Path, root: Path, *, answers: bool) -> Iterator[Finding]:
    """A journal of this boot without a capper: the limits in it may still be in force.

    Entries of an earlier boot say nothing before a capper compares them with the devices.
    """
    if answers:
        return
    try:
        boot = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return
    # The boot of an emulated host also has its name.
    journals = [
        read_journal(place, one) for one in boot_ids(place) if boot and one.startswith(boot)
    ]
    if damaged := {str(path) for found in journals for path in found.damaged}:
        yield Finding(
            Severity.WARN,
            "left behind",
            f"the journal is damaged: {', '.join(sorted(damaged))}",
            "Run `wattspan caps restore` as root: it restores what can be recovered, and names"
            " every device whose original limit is lost.",
        )
        return
    entries = [
        entry
        for found in journals
        for entry in found.entries.values()
        if entry.source is not EntrySource.EARLIER
    ]
    if imposed := _entry_names([entry for entry in entries if entry.imposed is not None]):
        yield Finding(
            Severity.WARN,
            "imposed limits",
            f"fixed caps or a power budget stay in force while no capper runs: {imposed} ({place})",
            "Start the capper, which takes them over, or run `wattspan caps restore` as root to"
            " lift them.",
        )
    if names := _entry_names([entry for entry in entries if entry.imposed is None]):
        yield Finding(
            Severity.FAIL,
            "left behind",
            f"a capper has ended without restoring {names} ({place})",
            "Run `wattspan caps restore` as root; the next capper does the same.",
        )


def _entry_names(entries: Sequence[JournalEntry]) -> str:
    return ", ".join(f"{entry.knob} of {entry.name or entry.device}" for entry in entries)
