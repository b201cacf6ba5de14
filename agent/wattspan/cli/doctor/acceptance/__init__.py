"""``wattspan doctor --acceptance``: the counters, the attribution and the limits under test.

No limit, clock or mode changes. The report names no host, user, file or serial number: it can be
attached to an issue.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from wattspan import __version__
from wattspan.capper.host_directory import capper_directory
from wattspan.cli.doctor import Finding, Severity, note, ok, source_context
from wattspan.cli.doctor.acceptance.checks import LIMITS, Check, Scalar
from wattspan.cli.doctor.acceptance.counters import WHOLE, CounterTests, Periods
from wattspan.cli.doctor.acceptance.loads import load_checks, run_loads
from wattspan.cli.doctor.host import container, hypervisor
from wattspan.cli.doctor.sources import open_source
from wattspan.cli.doctor.tuning import knob_states, unrestored_limits
from wattspan.cli.measure import standalone_configuration
from wattspan.cli.options import echo_error
from wattspan.cli.tune.text import setting_text
from wattspan.clock import SystemClock
from wattspan.model import GpuStatus, Knob, KnobState
from wattspan.ports import ActuatorError, CounterSource, SourceContext
from wattspan.service.assembly import standalone_agent
from wattspan.service.configuration import LoadedConfiguration, selected_emulated_host
from wattspan.util.files import file_text


def accept(
    loaded: LoadedConfiguration,
    clock: SystemClock,
    advance: Callable[[int], object],
    periods: Periods = WHOLE,
    root: Path = Path("/"),
) -> tuple[list[Check], dict[str, object], bool]:
    """All checks, the report, and whether the host is emulated. SourceError without a counter."""
    config = loaded.config
    with selected_emulated_host(config.emulation) as host:
        context = source_context(clock, host)
        opener = partial(_opened, loaded, context)
        settings = {name: config.sources[name] for name in loaded.plugins.sources}
        enabled = [n for n, one in settings.items() if getattr(one, "enabled", None) is not False]
        tests = CounterTests(opener, enabled, clock, advance, periods)
        checks = tests.run()
        place = capper_directory(Path(config.agent.state_dir), emulated=context.emulated)
        left = unrestored_limits(place, root)
        states = (one for knob in Knob for one in knob_states(knob, context, ()))
        checks += limit_checks(states, left, tests.labels)
    with standalone_agent(standalone_configuration(loaded), clock, echo_error) as client:
        checks += load_checks(run_loads(client, clock, advance, periods.loads))
    document = report(checks, tests.gpus.values(), root)
    return checks, document, context.emulated


def _opened(
    loaded: LoadedConfiguration, context: SourceContext, name: str
) -> CounterSource | Finding:
    """The source called ``name``, as the agent opens it, or the reason why it cannot."""
    return open_source(loaded.plugins.sources[name], loaded.config.sources[name], context)


def limit_checks(
    states: Iterable[KnobState | ActuatorError],
    left: Iterable[Finding],
    labels: Mapping[str, str],
) -> Iterator[Check]:
    """The limits that a capper would restore, read and not written; limits left in force."""
    for number, state in enumerate(states):
        if isinstance(state, ActuatorError):
            name = f"limit {number}"
            yield Check(LIMITS, name, note(name, str(state)), {"trouble": state.trouble})
            continue
        name = f"{state.key.knob} {labels.get(state.key.device, number)}"
        figures: dict[str, Scalar] = {
            "requested": state.requested,
            "enforced": state.enforced,
            "minimum": state.minimum,
            "default": state.default,
            "maximum": state.maximum,
        }
        if state.requested is None:
            found = note(name, "no limit is set or restored")
        else:
            limit = setting_text(state.key.knob, state.requested)
            found = ok(name, f"a capper would restore {limit}; nothing was written")
        yield Check(LIMITS, name, found, figures)
    for finding in left:
        yield Check(LIMITS, "left", finding, {"left": finding.mark is Severity.FAIL})


_HYPERVISORS = (
    "KVM", "QEMU", "VMware", "Xen", "Microsoft", "Amazon", "Google", "innotek", "OpenStack",
    "Nutanix", "Red Hat", "Oracle", "Alibaba", "DigitalOcean", "Hetzner",
)  # fmt: skip


def kernel_version(release: str) -> str:
    """The numbers at the begin of a release; its builder chooses the rest, as a name."""
    found = re.match(r"\d+(\.\d+)*", release, re.ASCII)
    return found[0] if found else "other"


def hypervisor_name(vendor: str) -> str:
    """The known vendor in a text of the firmware, "other", or "" without a hypervisor."""
    known = (one for one in _HYPERVISORS if one.lower() in vendor.lower())
    return next(known, "other") if vendor else ""


def report(checks: Iterable[Check], gpus: Collection[GpuStatus], root: Path) -> dict[str, object]:
    """The document for an issue."""
    cpu = (line for line in file_text(root / "proc/cpuinfo").splitlines() if "model name" in line)
    return {
        "wattspan": __version__,
        "kernel": kernel_version(platform.release()),
        "machine": platform.machine(),
        "cpu": next(cpu, "").partition(":")[2].strip(),
        "cpus": os.cpu_count(),
        "virtual": hypervisor_name(hypervisor(root)),
        "container": container(root),
        "gpus": [{"model": gpu.model, "driver": gpu.driver} for gpu in gpus],
        "checks": [one.plain() for one in checks],
    }
