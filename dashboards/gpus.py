"""GPUs: power against limits, and the boards' reactions to it."""

from __future__ import annotations

from typing import Any

from dashboards import palette, uids
from dashboards.layout import JOB, Chosen, Place, Row, dashboard
from dashboards.panels import Ask, Column, graph, listing, stat_panel
from dashboards.promql import COVER, JOULES_PER_KWH, by, rate, rest, series, spent, top
from dashboards.shared import FEW_HOSTS, PROCESS_NAMED, provenance

GPU = 'hw_id=~"$gpu"'
BOARDS = 'hw_type="gpu"'  # with All selected, the hosts' other devices are included
LIMITED = 'hw_id=~"gpu:.+"'  # the same, where the series does not say a device's type
ENERGY = series("hw_energy_joules_total", COVER, GPU, BOARDS)
LIMITS = series("wattspan_power_limit_watts", GPU, LIMITED)
ENFORCED = series("wattspan_power_limit_watts", GPU, LIMITED, 'limit="enforced"')
USED = series("hw_gpu_memory_usage_bytes", GPU)
FITTED = series("hw_gpu_memory_limit_bytes", GPU)
THROTTLED = series("wattspan_gpu_throttled_seconds_total", GPU)
BUSY = series("hw_gpu_utilization_ratio", GPU)
HEAT = series("hw_temperature_celsius", GPU, BOARDS)

BOARD = "instance, hw_id"
NAMED = "{{hw_name}}, {{instance}}"  # boards of several hosts have the same names
HEAT_STEPS = ((None, palette.GOOD), (80, palette.NOTICE), (90, palette.BAD))


def document() -> dict[str, Any]:
    gpu = Chosen(
        "gpu", "GPU", "One GPU or several, by name.",
        series("wattspan_gpu_info"), "hw_id", multi=True, all=True, shown_as="hw_name",
    )  # fmt: skip
    return dashboard(
        uids.GPUS,
        "Power of the GPUs against their limits, and the reaction of the boards: utilisation, "
        "clocks, throttling, memory, temperature, joules, and energy by process.",
        (JOB, FEW_HOSTS, gpu),
        (
            Row("", (*_headline(), *_power())),
            Row("By board", (_table(),)),
            Row("Board activity", _work()),
            Row("Energy by process", _processes()),
            Row("Measurement quality", _trust()),
            Row("Power against limits: one graph for each GPU", (_against_limits(),)),
        ),
    )


def _headline() -> tuple[Place, ...]:
    throttling = series("wattspan_gpu_throttling", GPU)
    limits = by(BOARD, ENFORCED)
    limited = f"({by(BOARD, rate(ENERGY))} and on ({BOARD}) {limits})"
    return (
        Place(
            stat_panel(
                "Power", "Power of the selected GPUs now: the rate of their energy counters.",
                palette.WATT, Ask(f"sum({rate(ENERGY)})"), empty="no GPU",
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Energy in this range", "Energy of the selected GPUs over the displayed time "
                "range.",
                palette.KWH, Ask(f"sum({spent(ENERGY)}) / {JOULES_PER_KWH}"),
                spark=False, decimals=1, empty="no GPU",
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Of the limit",
                "Power now as a part of the enforced power limits, of the GPUs with both known.",
                palette.SHARE, Ask(f"sum({limited}) / sum({limits} and on ({BOARD}) {limited})"),
                decimals=0, empty="no limits",
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Throttling",
                "GPUs that reduce their clocks now, for any reason. A power cap of the tuner is "
                "one.",
                palette.PLAIN, Ask(f"sum(max by ({BOARD}) ({throttling}))"), spark=False,
                steps=((None, palette.GOOD), (1, palette.NOTICE)), empty="not reported",
            ), 4, 4,
        ),
        Place(
            stat_panel(
                "Hottest", "The highest temperature of the selected GPUs.",
                palette.CELSIUS, Ask(f"max({HEAT})"), steps=HEAT_STEPS, empty="not reported",
            ), 4, 4,
        ),
        provenance(),
    )  # fmt: skip


def _power() -> tuple[Place, ...]:
    of_limit = f"{by('instance, hw_id, hw_name', rate(ENERGY))} / on ({BOARD}) group_left sum by"
    return (
        Place(
            graph(
                "Power by GPU", "The rate of each board's energy counter.",
                palette.WATT, Ask(by("instance, hw_name", rate(ENERGY)), NAMED),
                legend="list",
            ), 12, 9,
        ),
        Place(
            graph(
                "Power as a part of the enforced limit",
                "At 100 % the limit holds the board back. The limit is the one enforced by the "
                "driver, including a cap of the tuner; just after it was lowered, the averaged "
                "power can exceed it.",
                palette.SHARE, Ask(f"{of_limit} ({BOARD}) ({ENFORCED})", NAMED),
                steps=((None, "transparent"), (1, palette.NOTICE)), legend="list",
            ), 12, 9,
        ),
    )  # fmt: skip


def _table() -> Place:
    named = "instance, hw_id, hw_name"
    info = f"group by ({named}) ({series('wattspan_gpu_info', GPU)})"
    on_name = f"* on ({BOARD}) group_right {info}"
    return Place(
        listing(
            "GPUs",
            "Each board: power, the enforced limit, energy and time throttled in the range, "
            "utilisation, memory in use and temperature now.",
            (
                Column("hw_name", "GPU"),
                Column("A", "Power", palette.WATT, width=90),
                Column("B", "Limit", palette.WATT, width=80),
                Column("C", "Energy", palette.JOULE, width=90),
                Column("D", "Busy", palette.SHARE, width=120, bar=True),
                Column("E", "Memory", palette.SHARE, width=120, bar=True),
                Column("F", "Temperature", palette.CELSIUS, width=110, steps=HEAT_STEPS),
                Column("G", "Throttled", palette.SECONDS, width=90),
                Column("instance", "Host", width=140),
                Column("hw_id", "Identity"),
            ),
            Ask(by(named, rate(ENERGY))),
            Ask(f"{by(BOARD, ENFORCED)} {on_name}"),
            Ask(by(named, spent(ENERGY))),
            Ask(by(named, BUSY)),
            Ask(f"{by(named, USED)} / {by(named, FITTED)}"),
            Ask(by(named, HEAT)),
            Ask(f"{by(BOARD, spent(THROTTLED))} {on_name}"),
            sort="Power",
        ),
        24, 8,
    )  # fmt: skip


def _work() -> tuple[Place, ...]:
    clocks = series("wattspan_gpu_clock_hertz", GPU, 'clock="sm"')
    memory_busy = series("wattspan_gpu_memory_busy_ratio", GPU)
    named = "instance, hw_name"
    return (
        Place(
            graph(
                "Utilisation",
                "Fraction of time in which the GPU ran any kernel, not the used part of its "
                "capacity.",
                palette.SHARE, Ask(by(named, BUSY), NAMED), most=1, legend="list",
            ), 8, 8,
        ),
        Place(
            graph(
                "Clocks", "Current clock of the processors (SM).",
                palette.HERTZ, Ask(by(named, clocks), NAMED), legend="list",
            ), 8, 8,
        ),
        Place(
            graph(
                "Throttled",
                "Part of the time with reduced clocks, by reason, as a mean over the selected "
                "GPUs. Thermal reasons and power brakes need attention.",
                palette.SHARE,
                Ask(f"avg by (reason) ({rate(THROTTLED)})", "{{reason}}"),
                legend="list", bars=True, empty="not reported",
                colours={
                    "power_cap": palette.CALM, "sw_thermal": palette.NOTICE,
                    "hw_thermal": palette.BAD, "power_brake": "dark-red",
                },
            ), 8, 8,
        ),
        Place(
            graph(
                "Memory in use", "GPU memory in use as a part of the total.",
                palette.SHARE, Ask(f"{by(named, USED)} / {by(named, FITTED)}", NAMED),
                most=1, legend="list",
            ), 8, 8,
        ),
        Place(
            graph(
                "Memory busy",
                "Fraction of time in which the GPU's memory was read or written.",
                palette.SHARE, Ask(by(named, memory_busy), NAMED), most=1, legend="list",
            ), 8, 8,
        ),
        Place(
            graph(
                "Temperature", "Temperature of each board, as its driver reports it.",
                palette.CELSIUS, Ask(by(named, HEAT), NAMED), least=None, legend="list",
                steps=((None, "transparent"), (80, palette.NOTICE), (90, palette.BAD)),
            ), 8, 8,
        ),
    )  # fmt: skip


def _processes() -> tuple[Place, ...]:
    on_gpu = series("wattspan_process_energy_joules_total", 'hw_type="gpu"')
    one = "instance, command, pid"
    idle = series("wattspan_idle_energy_joules_total", GPU, BOARDS)
    unattributed = series("wattspan_unattributed_energy_joules_total", GPU, BOARDS)
    return (
        Place(
            graph(
                "Power by process",
                "Energy charged to processes on all GPUs of the selected hosts (a process's total "
                "covers all GPUs), and idle and unattributed power of the selected boards.",
                palette.WATT,
                Ask(f"sum({rate(idle)})", "idle"),
                Ask(f"sum({rate(unattributed)})", "unattributed"),
                Ask(rest(10, one, on_gpu), "other processes"),
                Ask(top(10, one, on_gpu), PROCESS_NAMED),
                stack=True, colours=palette.ACCOUNTS,
            ), 14, 9,
        ),
        Place(
            listing(
                "Processes",
                "GPU energy of the range by process, and its part of the energy charged to all "
                "processes on GPUs.",
                (
                    Column("command", "Command"),
                    Column("pid", "PID", width=80),
                    Column("instance", "Host", width=140),
                    Column("A", "Energy", palette.JOULE, width=90),
                    Column("B", "Share", palette.SHARE, width=120, bar=True),
                ),
                Ask(f"topk(50, {by(one, spent(on_gpu))})"),
                Ask(f"topk(50, {by(one, spent(on_gpu))}) / scalar(sum({spent(on_gpu)}))"),
                sort="Energy",
            ), 10, 9,
        ),
    )  # fmt: skip


def _trust() -> tuple[Place, ...]:
    divergence = series("wattspan_gpu_energy_divergence_ratio", GPU)
    sensor = series("wattspan_gpu_power_average_watts", GPU)
    named = "instance, hw_name"
    return (
        Place(
            graph(
                "Sensor against counter",
                "Integrated power over counted energy, minus one: disagreement of the two "
                "measurements of the same joules. The true value of both is unknown.",
                palette.SHARE, Ask(by(named, divergence), NAMED),
                least=None, legend="list", empty="not compared",
            ), 12, 7,
        ),
        Place(
            graph(
                "Power sensor",
                "The average power reported by the sensor, over its own window; the graphs above "
                "use the energy counter instead.",
                palette.WATT, Ask(by(named, sensor), NAMED), legend="list",
                empty="not reported",
            ), 12, 7,
        ),
    )  # fmt: skip


def _against_limits() -> Place:
    panel = graph(
        "Power against limits: ${gpu:text}",
        "Power of one board (the rate of its counter) under the enforced limit, between the "
        "lowest and the highest possible limit; `original` is the limit before any change by the "
        "agent.",
        palette.WATT,
        Ask(by("instance", rate(ENERGY)), "power, {{instance}}"),
        Ask(by("instance, limit", LIMITS), "{{limit}}, {{instance}}"),
        colours={f"/^{limit}, /": colour for limit, colour in palette.LIMITS.items()},
        stepped=True, legend="list",
        dashed=("/^(minimum|maximum|default|original|requested|ceiling), /",),
    )  # fmt: skip
    return Place(panel.repeat("gpu").repeat_direction("h").max_per_row(2), 24, 8)
