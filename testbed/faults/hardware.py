"""Counters and GPUs that vanish, stop, run backwards, return garbage, or hang."""

from __future__ import annotations

from collections.abc import Callable

from testbed.faults.judge import flowing
from testbed.faults.observation import Sight
from testbed.faults.schedule import Fault, Sign, away, down, gap, unreadable
from testbed.faults.stage import Stage

ZONE, DOMAIN = "intel-rapl:0", "rapl:package-0"
PACKAGES = ("intel-rapl:0", "intel-rapl:1")

Act = Callable[[Stage], object]


def zone(fault: str, *zones: str) -> Act:
    """Do something to the counters of some zones, the first package's unless others are named."""

    def act(stage: Stage) -> None:
        for one in zones or (ZONE,):
            stage.host.ask(do="fault", zone=one, fault=fault)

    return act


def gpu(fault: str, on: object = True, index: int = 0) -> Act:
    return lambda stage: stage.host.ask(do="fault", gpu=index, fault=fault, on=on)


def driver(fault: str, *, on: bool) -> Act:
    return lambda stage: stage.host.ask(do="fault", fault=fault, on=on)


def nothing(_: Stage) -> None:
    """The fault is over by itself."""


def charged(before: Sight, at_end: Sight, now: Sight) -> bool:
    """Well, and somebody is charged for the GPUs' energy again."""
    name = "wattspan_group_energy_joules_total"
    return flowing(before, at_end, now) and now.total(
        name, hw_type="gpu", group_kind="user"
    ) > at_end.total(name, hw_type="gpu", group_kind="user")


def then(*acts: Act) -> Act:
    """One act after the other."""

    def act(stage: Stage) -> None:
        for one in acts:
            one(stage)

    return act


def start_anew(stage: Stage) -> None:
    stage.restart()


COUNTERS = (
    Fault(
        "one counter disappears and returns",
        zone("vanish"),
        zone("reappear"),
        "A package went offline or its driver was unbound. Its account stays, `domain_up` is "
        "0, and the time until its return is a gap; others are not affected.",
        [unreadable("rapl", "absent"), away(DOMAIN)],
    ),
    Fault(
        "one counter stands still, then catches up",
        zone("freeze"),
        zone("mend"),
        "Firmware or a hypervisor stopped updating the register. Once it has stood "
        "still for three seconds while CPUs worked, it is reported as frozen and not counted. "
        "If it advances within ten seconds its energy is counted, and later the time is a gap.",
        [unreadable("rapl", "stuck")],
        lasts=8.0,
        short=4.5,
    ),
    Fault(
        "one counter restarts at zero",
        zone("reset"),
        nothing,
        "One tick is a gap, and counting continues from there.",
        [gap("reset", DOMAIN)],
        lasts=1.0,
        short=0.5,
    ),
    Fault(
        "one counter runs backwards by 100 J",
        zone("rewind"),
        nothing,
        "The agent does not interpret it as a wrap, which would be a spike of 262 kJ: one "
        "tick is a gap.",
        [gap("reset", DOMAIN)],
        lasts=1.0,
        short=0.5,
    ),
    Fault(
        "one counter jumps to just below its end, and wraps",
        zone("brink"),
        nothing,
        "The jump exceeds the maximum energy of the package, so it is a gap; the wrap is counted.",
        [gap("implausible", DOMAIN)],
        lasts=1.0,
        short=0.5,
    ),
    Fault(
        "one counter returns invalid data",
        zone("garble"),
        zone("mend"),
        "Text that is not a number is not a reading. The next valid one covers up to ten "
        "seconds. (The emulated counter is registered again when it is repaired; hence the "
        "gap.)",
        [unreadable("rapl", "malformed")],
    ),
    Fault(
        "reading one counter fails (EIO)",
        zone("fail"),
        zone("mend"),
        "The register could not be read; check the kernel's log for MSR errors.",
        [unreadable("rapl", "retry")],
    ),
    Fault(
        "one counter is unreadable (EACCES)",
        zone("deny"),
        zone("mend"),
        "The mode of the file was changed; `wattspan doctor` names the remedy.",
        [unreadable("rapl", "denied")],
    ),
    Fault(
        "the whole powercap tree disappears and returns",
        zone("vanish", *PACKAGES),
        zone("reappear", *PACKAGES),
        "The module intel_rapl was unloaded. The source is down until it is loaded again; the"
        " measurement of GPUs continues.",
        [unreadable("rapl", "absent"), down("rapl"), away(DOMAIN)],
        lasts=12.0,
        short=6.0,
    ),
)

GPUS = (
    Fault(
        "every NVML call hangs",
        driver("driver_hang", on=True),
        driver("driver_hang", on=False),
        "The driver does not answer (check dmesg for Xid messages). CPU figures continue; the"
        " GPUs' source is down until the call returns, and the energy meanwhile is counted if"
        " it covers less than ten seconds, and is a gap otherwise.",
        [unreadable("nvml", "stuck"), down("nvml")],
        lasts=30.0,
        short=7.0,
        well=charged,
    ),
    Fault(
        "one GPU is lost and returns",
        gpu("lost"),
        gpu("lost", on=False),
        "The GPU fell off the bus, or was reset. Its account stays and its time is a gap; the"
        " measurement of the other GPU continues.",
        [unreadable("nvml", "retry"), away()],
        lasts=20.0,
        short=3.0,
        well=charged,
    ),
    Fault(
        "the driver is unloaded and loaded",
        driver("driver_gone", on=True),
        driver("driver_gone", on=False),
        "Every call fails. The agent reconnects within seconds of the driver's return.",
        [unreadable("nvml", "absent"), away()],
        lasts=20.0,
        short=3.0,
        well=charged,
    ),
    Fault(
        "a GPU's energy counter restarts at zero",
        gpu("reload_driver"),
        nothing,
        "One reading is a gap; no excess energy is counted.",
        [gap("reset")],
        lasts=1.0,
        short=0.5,
        well=charged,
    ),
)

STARTING = "it is ended and started anew"

STARTS = (
    Fault(
        "the agent is started while a counter is gone",
        then(zone("vanish"), start_anew),
        zone("reappear"),
        "Its account is shown with `domain_up` 0, and continues when it returns.",
        [
            Sign(
                "`domain_up` 0",
                lambda _, now: any(not up for _, up in now.pick("wattspan_domain_up")),
                meanwhile=True,
            )
        ],
        unanswered=STARTING,
        lasts=3.0,
        short=1.0,
    ),
    Fault(
        "the agent is started while every NVML call hangs",
        then(driver("driver_hang", on=True), start_anew),
        driver("driver_hang", on=False),
        "The agent serves the CPUs' figures, and the GPUs' as soon as the driver answers.",
        [unreadable("nvml", "stuck"), down("nvml")],
        unanswered=STARTING,
        lasts=10.0,
        short=4.0,
        well=charged,
    ),
    Fault(
        "the agent is started while the driver is not loaded",
        then(driver("driver_gone", on=True), start_anew),
        driver("driver_gone", on=False),
        "As above.",
        [unreadable("nvml", "absent"), down("nvml")],
        unanswered=STARTING,
        lasts=20.0,
        short=4.0,
        well=charged,
    ),
)

FAULTS = (*COUNTERS, *GPUS, *STARTS)


# ------------------------------------------------------------------------ several at once

MEMORY, OTHER, OTHER_MEMORY = "intel-rapl:0:0", "intel-rapl:1", "intel-rapl:1:0"


def each(**done: str) -> Act:
    """Faults by zone: of the first package, its memory, the other package and its memory."""
    zones = {"package": ZONE, "memory": MEMORY, "other": OTHER, "other_memory": OTHER_MEMORY}

    def act(stage: Stage) -> None:
        for which, fault in done.items():
            stage.host.ask(do="fault", zone=zones[which], fault=fault)

    return act


AT_ONCE = (
    Fault(
        "four counters fail in four ways",
        each(package="garble", memory="fail", other="freeze", other_memory="deny"),
        each(package="mend", memory="mend", other="mend", other_memory="mend"),
        "Each costs only itself.",
        [unreadable("rapl", trouble) for trouble in ("malformed", "retry", "stuck", "denied")],
        short=4.0,
    ),
    Fault(
        "three counters jump at once",
        each(package="rewind", other="brink", memory="reset"),
        nothing,
        "Each is a gap of a tick.",
        [gap("reset", DOMAIN), gap("implausible", "rapl:package-1")],
        short=0.5,
    ),
)
"""A short sequence of the faults above, for the tests."""
