"""Which knobs could be turned here, who would turn them, and what an earlier one left behind."""

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
    """Reads knobs and asks the capper how it is; writes nothing and starts nobody.

    ``domains`` are what is measured here.
    """
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
            'Set mode = "advise" to be told what could be saved; "apply" saves it.',
        )
    jobs = ", ".join(filter(None, (job.service or job.span for job in tuned.job)))
    named = f"for {jobs}" if jobs else "no job is named"
    budget = f"{100 * tuned.max_slowdown:.4g}% slower at most"
    if tuned.mode == "apply" and not jobs and not tuned.apply_found:
        return Finding(
            Severity.WARN,
            "tuning",
            f"apply, {budget}, but {named}, so nothing is turned",
            "Name a job in [[autotune.job]], or set apply_found = true.",
        )
    return Finding(Severity.OK, "tuning", f"{tuned.mode}, {budget}, {named}")


# ------------------------------------------------------------------------------------- the knobs


def _knobs(
    config: Config,
    context: SourceContext,
    domains: Collection[Domain],
    known: Mapping[CapKey, CapRow],
) -> Iterator[Finding]:
    """Each knob of each device as it stands; one finding for a knob that nothing here has."""
    for knob in Knob:
        found = list(_states(knob, context, domains))
        chosen = knob in config.autotune.knobs
        wanted = chosen and config.autotune.mode != "off"
        if not found:
            mark = Severity.WARN if wanted else Severity.NOTE
            yield Finding(mark, knob.value, _NO_KNOB_REASONS[knob])
        for told in found:
            if isinstance(told, ActuatorError):
                mark = Severity.WARN if wanted else Severity.NOTE
                yield Finding(mark, knob.value, str(told))
            else:
                row = known.get(told.key)
                yield _knob(told, row, chosen=chosen)


def _knob(state: KnobState, row: CapRow | None, *, chosen: bool) -> Finding:
    knob = state.key.knob
    what = f"{knob} {state.name}"
    parts = [
        f"{setting_text(knob, state.requested)} now" if state.requested is not None else "",
        f"from {setting_text(knob, state.minimum)} on" if state.minimum is not None else "",
        f"{setting_text(knob, state.maximum)} at most" if state.maximum is not None else "",
        f"obeys {setting_text(knob, state.enforced)}" if state.enforced != state.requested else "",
    ]
    detail = ", ".join(filter(None, parts))
    if row is not None and not row.usable:
        return Finding(Severity.WARN if chosen else Severity.NOTE, what, f"{detail}; {row.trouble}")
    if row is not None and row.foreign:
        detail += "; somebody else has set it, so it is let be"
        return Finding(Severity.WARN, what, detail, "`wattspan caps status` tells more.")
    if row is not None and row.holder:
        detail += f"; held by {row.holder}"
    if not chosen:
        detail += "; not in [autotune] knobs"
    return Finding(Severity.OK if chosen else Severity.NOTE, what, detail)


def _states(
    knob: Knob, context: SourceContext, domains: Collection[Domain]
) -> Iterator[KnobState | ActuatorError]:
    """What each device says of itself; why not, if it is measured here and has such a knob."""
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


# ------------------------------------------------------------------------------------ the capper


class _CapperProbe:
    """What the process says that alone may write, if one answers."""

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
        """``left`` is whether an earlier one has left limits behind."""
        if self._refusal:
            return Finding(
                Severity.WARN,
                "capper",
                f"answers at {self._path} and refuses: {self._error}",
                "Name this user in [caps] users, and start the capper anew.",
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
        """It was asked to give everything back, and keeps to that as long as it runs."""
        from wattspan.capper.client import has_capper_unit

        by_systemd = has_capper_unit(root) and not self._emulated
        anew = "Run `systemctl restart wattspan-capper` as root"
        if not by_systemd:
            anew = "Start the capper anew, or the agent that has started it"
        return Finding(
            Severity.WARN,
            "capper",
            f"answers at {self._path} (pid {self._pid}); everything was given back by `wattspan"
            " caps restore`, so neither a budget nor a fixed cap is kept, and nothing is tuned",
            f"{anew}, if limits are to be set again.",
        )

    def _silent(self, root: Path, *, left: bool) -> Finding:
        """Nobody answers: whether that matters, and whether the agent would start one."""
        from wattspan.capper.client import capper_start_command, has_capper_unit

        caps, tuned = self._config.caps, self._config.autotune
        wanted = tuned.mode == "apply" or bool(caps.fixed or caps.budget_watts or caps.budget_file)
        may = os.geteuid() == 0 or _CAPABILITY in capabilities(root)
        why = f"none at {self._path}"
        if self._path.exists():
            why = printable(self._error).partition(". ")[0]
        start = capper_start_command(root)
        if left:
            remedy = f"Run `{start}` as root, if limits are still to be set." if wanted else ""
            detail = f"{why}, and an earlier one has ended without giving back what it had set"
            return Finding(Severity.WARN, "capper", detail, remedy)
        if not wanted:
            return Finding(
                Severity.NOTE, "capper", f"{why}; none is needed, nothing is to be capped"
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
            f"Run `{start}` as root; until then there is advice only.",
        )


# ----------------------------------------------------------------------------- what was left here


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
            "Run `wattspan caps restore` as root: it gives back what can be recovered, and names"
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
            f"a capper has ended without giving back {names} ({place})",
            "Run `wattspan caps restore` as root; the next capper does the same.",
        )


def _entry_names(entries: Sequence[JournalEntry]) -> str:
    return ", ".join(f"{entry.knob} of {entry.name or entry.device}" for entry in entries)
