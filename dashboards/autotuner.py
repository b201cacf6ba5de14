"""Autotuner: savings, their cost in speed, and the reasons of decisions."""

from __future__ import annotations

from typing import Any

from dashboards import palette, uids
from dashboards.layout import HOSTS, JOB, Chosen, Marks, Place, Row, dashboard
from dashboards.panels import Ask, Column, cell, graph, link, listing, stat_panel, states
from dashboards.promql import at_the_end, by, rate, series, spent
from dashboards.shared import provenance

TUNED = 'exported_job=~"$tuned"'
ONE = "instance, exported_job, knob"
LEGEND = "{{exported_job}}, {{instance}}"
MANY = 20
"""Most jobs, caps or hosts in one graph; the most important ones are selected."""

SLOWDOWN = series("wattspan_autotune_slowdown_ratio", TUNED)
BOUND = series("wattspan_autotune_slowdown_bound_ratio", TUNED)
HELD = series("wattspan_autotune_held_slowdown_ratio", TUNED)
HELD_BOUND = series("wattspan_autotune_held_slowdown_bound_ratio", TUNED)
BUDGET = series("wattspan_autotune_budget_ratio", TUNED)
SAVING = series("wattspan_autotune_saving_ratio", TUNED)
SURELY = series("wattspan_autotune_saved_joules_total", TUNED)
ESTIMATE = series("wattspan_autotune_saved_estimate_joules", TUNED)
DECISIONS = series("wattspan_autotune_decisions_total", TUNED)
IN_FORCE = series("wattspan_autotune_decision_info", TUNED)
CAPS = series("wattspan_cap_power_watts")
CLOCK_CAPS = series("wattspan_cap_clock_hertz")

CLOSEST = (
    f"topk({MANY}, {at_the_end(BOUND)} / on ({ONE}) {at_the_end(BUDGET)}"
    f" or on ({ONE}) {at_the_end(BUDGET)} * 0)"
)
"Jobs by the used part of their budget; jobs without a bound have used none."

CLOSEST_SAYS = f"Of more than {MANY} jobs, those that are closest to their budget."

LOWEST = f"bottomk({MANY}, {at_the_end(CAPS)})"

CAPPED = "{{holder}} on {{hw_id}}, {{instance}}"

WHOLE_RUN = "of the whole run, exploration included, against the original setting"


def _closest(expr: str) -> str:
    return f"{expr} and on ({ONE}) {CLOSEST}"


def document() -> dict[str, Any]:
    tuned = Chosen(
        "tuned", "Tuned job", "Prometheus calls the tuned job's label `exported_job`.",
        series("wattspan_autotune_job_info"), "exported_job", multi=True, all=True,
    )  # fmt: skip
    # comparisons that confirm a held setting happen every half minute: they are in the
    # graphs, and marks for them would hide these.
    turns = series("wattspan_autotune_decisions_total", TUNED, 'move=~"release|decline"')
    decisions = Marks(
        "Decisions",
        f"sum by (instance, exported_job, move, reason) (increase({turns}[$__rate_interval])) > 0",
        title="{{exported_job}}: {{move}}", text="{{reason}} on {{instance}}",
        tags="move,reason", colour=palette.MARK,
    )  # fmt: skip
    caps = Marks(
        "New caps",
        # a cap is released for seconds repeatedly, to compare with the original
        f"changes({CAPS}[$__rate_interval]) > 0"
        f" or {CAPS} unless present_over_time({CAPS}[10m] offset 1m)",
        title="{{holder}}: another cap", text="{{hw_id}} on {{instance}}",
        tags="knob", colour=palette.MARK,
    )  # fmt: skip
    return dashboard(
        uids.AUTOTUNER,
        "Savings of the tuner, their cost in speed against the budget, the caps set, and the "
        "reason of each decision. `wattspan tune explain` prints the same as text.",
        (JOB, HOSTS, tuned),
        (
            Row("", (*_headline(), *_promise())),
            Row("Caps", _caps()),
            Row("Savings", _savings()),
            Row("Decisions", _decisions()),
            Row("Evidence", _grounds()),
            Row("The capper", _capper()),
        ),
        marks=(decisions, caps),
    )


def _headline() -> tuple[Place, ...]:
    none = "nothing is tuned"
    capper = series("wattspan_capper_up")
    foreign = series("wattspan_cap_foreign")
    mode = series("wattspan_autotune_mode_info")
    return (
        Place(
            stat_panel(
                "Of the budget",
                "The job that is closest to its budget: the upper bound of its slowdown "
                f"{WHOLE_RUN}, as a part of the slowdown it is allowed. Above 100 % the promise "
                "is broken.",
                palette.SHARE, Ask(f"max({BOUND} / on ({ONE}) {BUDGET})"),
                decimals=0, empty=none,
                steps=((None, palette.GOOD), (0.9, palette.NOTICE), (1, palette.BAD)),
            ), 3, 4,
        ),
        Place(
            stat_panel(
                "Certain savings in this range",
                "Growth of the lower bound of the saved energy: estimate less two standard errors.",
                palette.JOULE, Ask(f"sum({spent(SURELY)})"), spark=False, decimals=1, empty=none,
            ), 5, 4,
        ),
        Place(
            stat_panel(
                "Saving at the held setting",
                "Saved part of the energy of a unit of work at the held setting: mean over jobs "
                "that hold one.",
                palette.SHARE, Ask(f"avg({SAVING})"), decimals=1, empty="no setting held",
                steps=((None, palette.NOTICE), (0, palette.GOOD)),
            ), 5, 4,
        ),
        Place(
            stat_panel(
                "Mode", "Mode of the tuner, `[autotune] mode`: off, advise or apply.",
                palette.PLAIN, Ask(f"count by (mode) ({mode})", "{{mode}}"),
                spark=False, names=True,
                colours={"apply": palette.GOOD, "advise": palette.CALM, "off": palette.IDLE},
            ), 2, 4,
        ),
        Place(
            stat_panel(
                "Capper",
                "Whether the capper, the only process that may write limits, responds, on every "
                "host with tuning.",
                palette.PLAIN, Ask(f"min({capper})"), spark=False, empty="not configured",
                maps={"1": ("answers", palette.GOOD), "0": ("silent", palette.BAD)},
            ), 3, 4,
        ),
        Place(
            stat_panel(
                "Foreign caps",
                "Actuators set by another program, which the tuner leaves unchanged.",
                palette.PLAIN, Ask(f"sum({foreign})"), spark=False, empty="no actuators",
                steps=((None, palette.GOOD), (1, palette.NOTICE)),
            ), 3, 4,
        ),
        provenance(width=3),
    )  # fmt: skip


def _promise() -> tuple[Place, ...]:
    coded = " + ".join(
        f"{place} * {by(ONE, _in_state(name))}" for place, name in enumerate(palette.STATES)
    )
    names = {
        str(place): (name, colour) for place, (name, colour) in enumerate(palette.STATES.items())
    }
    return (
        Place(
            graph(
                "Slowdown against budget",
                f"Slowdown of each job {WHOLE_RUN}: the estimate, the upper bound of "
                f"99 %, and the budget that limits the bound. "
                f"{CLOSEST_SAYS}",
                palette.SHARE,
                Ask(_closest(SLOWDOWN), f"slowdown: {LEGEND}"),
                Ask(_closest(BOUND), f"bound: {LEGEND}"),
                Ask(_closest(BUDGET), f"budget: {LEGEND}"),
                least=None, legend="list", dashed=("/^budget: /",),
                empty="no tuned jobs", colours={"/^budget: /": palette.BAD},
            ), 14, 10,
        ),
        Place(
            states(
                "States",
                "State of each job. `released`: it has its original setting again; `declined`: it "
                "is "
                f"not tuned, for the reason of the current decision. {CLOSEST_SAYS}",
                names, Ask(_closest(f"({coded})"), LEGEND),
            ), 10, 10,
        ),
    )  # fmt: skip


def _in_state(state: str) -> str:
    return series("wattspan_autotune_state", TUNED, f'state="{state}"')


def _caps() -> tuple[Place, ...]:
    shown = series("wattspan_power_limit_watts", 'limit=~"enforced|original|minimum"')
    return (
        Place(
            graph(
                "Power caps",
                "Power cap of each device by holder: a tuned job, `operator` for a fixed cap, "
                "`budget` for the host's. No line without a cap. Of more than "
                f"{MANY}, the lowest.",
                palette.WATT,
                Ask(f"{CAPS} and on (instance, hw_id, knob) {LOWEST}", CAPPED), stepped=True,
                legend="list", empty="no cap held",
            ), 12, 9,
        ),
        Place(
            graph(
                "Limits of the capped devices",
                "For every device with a cap in the range: the enforced limit as read back, the "
                "original limit, and the lowest possible limit.",
                palette.WATT,
                Ask(
                    f"{shown} and on (instance, hw_id) {LOWEST}",
                    "{{limit}}: {{hw_id}}, {{instance}}",
                ),
                stepped=True, legend="list", dashed=("/^(original|minimum): /",),
                empty="no cap held",
            ), 12, 9,
        ),
        Place(
            graph(
                "Clock caps",
                f"Clock cap of each device by holder. Of more than {MANY}, the lowest.",
                palette.HERTZ, Ask(f"bottomk({MANY}, {CLOCK_CAPS})", CAPPED), stepped=True,
                legend="list", empty="no clock held",
            ), 12, 6,
        ),
        Place(
            graph(
                "Setting and its speed",
                "Slowdown of each job at the held setting, and its upper bound. The whole run's "
                "slowdown tends towards it.",
                palette.SHARE,
                Ask(_closest(HELD), f"slowdown: {LEGEND}"),
                Ask(_closest(HELD_BOUND), f"bound: {LEGEND}"),
                least=None, legend="list", empty="no setting held",
            ), 12, 6,
        ),
    )  # fmt: skip


def _savings() -> tuple[Place, ...]:
    bounds = "wattspan_autotune_saved_bound_joules"
    lower, upper = (series(bounds, TUNED, f'bound="{one}"') for one in ("lower", "upper"))
    return (
        Place(
            graph(
                "Energy saved, with its bounds",
                f"Energy saved {WHOLE_RUN}, over all chosen jobs: the estimate, and the sums of "
                "the jobs' lower and upper bounds. It may fall, and below zero.",
                palette.JOULE,
                Ask(f"sum({lower})", "lower bound"),
                Ask(f"sum({ESTIMATE})", "estimate"),
                Ask(f"sum({upper})", "upper bound"),
                least=None, calcs=("lastNotNull",), empty="no tuned jobs",
                band=("lower bound", "upper bound"),
                colours={
                    "estimate": palette.GOOD, "lower bound": palette.IDLE,
                    "upper bound": palette.IDLE,
                },
            ), 12, 9,
        ),
        Place(
            graph(
                "Saving of a unit of work",
                "Saved part of the energy of a unit of work at the held setting, by job.",
                palette.SHARE, Ask(_closest(SAVING), LEGEND), least=None, empty="no setting held",
            ), 12, 9,
        ),
    )  # fmt: skip


def _decisions() -> tuple[Place, ...]:
    info = series("wattspan_autotune_job_info", TUNED)
    lost = series("wattspan_autotune_lost_seconds", TUNED)
    allowed = series("wattspan_autotune_allowance_seconds", TUNED)
    return (
        Place(
            listing(
                "Jobs",
                "Each tuned job: the current decision and its reason, slowdown, bound and budget "
                "of its whole run, and the saving at the held setting. `applied` is false for "
                "advice. The service links to its spans.",
                (
                    Column("exported_job", "Job"),
                    Column("service_name", "Service", link=link(
                        "Its spans", uids.SPANS,
                        instance=cell("Host"), service=cell("Service"),
                    )),
                    Column("knob", "Knob", width=95),
                    Column("applied", "Applied", width=75),
                    Column("move", "Decision", width=85),
                    Column("reason", "Reason", width=130),
                    Column("B", "Slowdown", palette.SHARE, width=90),
                    Column("C", "Bound", palette.SHARE, width=80),
                    Column("D", "Budget", palette.SHARE, width=80),
                    Column("E", "Saving", palette.SHARE, width=80),
                    Column("instance", "Host", link=link(
                        "This host", uids.HOST, instance=cell("Host"),
                    )),
                ),
                Ask(
                    f"group by ({ONE}, move, reason, service_name, applied) ({IN_FORCE}"
                    f" * on ({ONE}) group_left (service_name, applied) {info})"
                ),
                *(Ask(by(ONE, figure)) for figure in (SLOWDOWN, BOUND, BUDGET, SAVING)),
                empty="no tuned jobs",
            ), 24, 7,
        ),
        Place(
            listing(
                "Decisions by reason",
                "Changed decisions of the range by action and reason; releases and declines are "
                "marks on the graphs above. Only releases are counted from zero: a job's first "
                "decision for any other reason is in no increase.",
                (
                    Column("exported_job", "Job"),
                    Column("move", "Decision", width=90),
                    Column("reason", "Reason"),
                    Column("A", "Times", palette.PLAIN, width=80),
                ),
                Ask(f"round({by('exported_job, move, reason', spent(DECISIONS))}) > 0"),
                sort="Times", empty="none in this range",
            ), 10, 9,
        ),
        Place(
            graph(
                "Time lost against time budget",
                "Total time lost to caps by each job, and the time its budget permits so far.",
                palette.SECONDS,
                Ask(_closest(lost), f"lost: {LEGEND}"),
                Ask(_closest(allowed), f"allowed: {LEGEND}"),
                least=None, legend="list", dashed=("/^allowed: /",), empty="no tuned jobs",
            ), 14, 9,
        ),
    )  # fmt: skip


def _grounds() -> tuple[Place, ...]:
    pairs = series("wattspan_autotune_pairs", TUNED)
    exploring = series("wattspan_autotune_exploration_seconds_total", TUNED)
    units = series("wattspan_autotune_units_total", TUNED)
    requests = series("wattspan_autotune_load_requests", TUNED)
    bins = series("wattspan_autotune_load_bin", TUNED)
    loads = series("wattspan_autotune_load_ratio", TUNED)
    misses = series("wattspan_autotune_slo_miss_ratio", TUNED)
    return (
        Place(
            graph(
                "Comparisons",
                "Pairs with the original setting behind the current figures. They restart when "
                "the work changes.",
                palette.PLAIN, Ask(_closest(pairs), LEGEND), legend="list",
                empty="no tuned jobs",
            ), 12, 8,
        ),
        Place(
            graph(
                "Units of work, and time spent exploring",
                "Units of work per second, and the part of the time lost to exploration.",
                palette.PLAIN,
                Ask(_closest(by(ONE, rate(units))), f"units a second: {LEGEND}"),
                Ask(_closest(by(ONE, rate(exploring))), f"exploring: {LEGEND}"),
                legend="list", empty="no tuned jobs",
            ), 12, 8,
        ),
        Place(
            graph(
                "Requests in flight of tracked servers",
                "Load, and the largest load of its load bin. Of more than "
                f"{MANY} servers, those with the highest load.",
                palette.PLAIN, Ask(f"topk({MANY}, {requests})", LEGEND),
                Ask(f"topk({MANY}, {bins})", f"bin: {LEGEND}"),
                legend="list", dashed=("/^bin: /",), empty="no tracked servers",
            ), 24, 8,
        ),
        Place(
            graph(
                "Load of tracked servers",
                "Load relative to the largest one at which the present setting is certified. "
                "Above 100 % the setting is raised. No line at the original setting. Of more than "
                f"{MANY} servers, those with the highest load.",
                palette.SHARE, Ask(f"topk({MANY}, {loads})", LEGEND), legend="list",
                empty="no lower setting of a tracked server",
            ), 12, 8,
        ),
        Place(
            graph(
                "Requests over a latency limit",
                "Part of the requests of each tracked server over a limit of `slo`, of all since "
                f"its start. Of more than {MANY}, the highest.",
                palette.SHARE, Ask(f"topk({MANY}, {misses})", f"{{{{slo}}}}: {LEGEND}"),
                legend="list", empty="no tracked servers",
            ), 12, 8,
        ),
    )  # fmt: skip


def _capper() -> tuple[Place, ...]:
    writes = series("wattspan_capper_writes_total")
    restores = series("wattspan_capper_restores_total")
    usable = series("wattspan_cap_usable")
    foreign = series("wattspan_cap_foreign")
    up = series("wattspan_capper_up")
    silent = f"bottomk({MANY}, min_over_time({up}[$__range] @ end()))"
    knob = "instance, hw_id, knob"
    states_of = f"{by(knob, usable)} - on ({knob}) {by(knob, foreign)} or {by(knob, usable)}"
    worst = f"bottomk(200, {states_of})"
    yes = {"1": ("yes", palette.GOOD), "0": ("no", palette.IDLE)}
    return (
        Place(
            states(
                "Answers",
                f"Whether the capper responds, by host. Of more than {MANY} hosts, those without a "
                "response.",
                {"1": ("answers", palette.GOOD), "0": ("silent", palette.BAD)},
                Ask(f"{by('instance', up)} and on (instance) {silent}", "{{instance}}"),
            ), 8, 7,
        ),
        Place(
            graph(
                "Writes",
                "Limits per second that were written, and that were restored to the original.",
                palette.PER_SECOND,
                Ask(f"sum({rate(writes)})", "written"), Ask(f"sum({rate(restores)})", "restored"),
                legend="list", empty="no capper",
            ), 8, 7,
        ),
        Place(
            listing(
                "Knobs",
                "Each actuator of each device: whether the capper can write it, and whether "
                "another program has set it. Of more than 200, only those with a problem.",
                (
                    Column("hw_id", "Device"),
                    Column("knob", "Knob", width=95),
                    Column("A", "Usable", width=75, named=yes),
                    Column("B", "Foreign", width=75, named={
                        "1": ("yes", palette.NOTICE), "0": ("no", palette.GOOD),
                    }),
                    Column("instance", "Host", width=140),
                ),
                Ask(f"{by(knob, usable)} and on ({knob}) {worst}"),
                Ask(f"{by(knob, foreign)} and on ({knob}) {worst}"),
                empty="no actuators",
            ), 8, 7,
        ),
    )  # fmt: skip
