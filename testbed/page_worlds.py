"""Worlds for the live page, made up: ``/live.json`` documents of hosts that no test could have.

Every flow here conserves, as the agent's do: at each inner node the incoming flow equals the
outgoing flow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from testbed.snapshots import engine_host
from wattspan.api.snapshot_document import snapshot_document

AT = 1_790_000_000.0
HISTORY = 720  # samples of five seconds: an hour
STEP = 5.0

Json = dict[str, Any]
Job = tuple[str, str, dict[str, float]]
"""A group, a process and the watts it spends by hardware type."""


def flow(devices: Sequence[Json], jobs: Sequence[Job], spans: Json, seconds: float) -> Json:
    """A flow: ``spans`` gives each process's spans and the part of it that they spend."""
    nodes: dict[str, Json] = {}
    links: dict[tuple[str, str, str], float] = {}

    def node(key: str, layer: str, name: str, kind: str | None, watts: float, detail: str) -> None:
        known = nodes.setdefault(
            key,
            {"id": key, "layer": layer, "name": name, "detail": detail, "type": kind}
            | {"watts": 0.0, "joules": 0.0, "provenance": "emulated"},
        )
        known["watts"] += watts
        known["joules"] += watts * seconds

    def link(source: str, target: str, kind: str, watts: float) -> None:
        if watts > 0:
            links[source, target, kind] = links.get((source, target, kind), 0.0) + watts

    spent: dict[str, float] = {}
    for _, _, watts in jobs:
        for kind, amount in watts.items():
            spent[kind] = spent.get(kind, 0.0) + amount
    for device in devices:
        key, kind = f"d:{device['id']}", device["type"]
        alike = [other for other in devices if other["type"] == kind]
        busy = spent.get(kind, 0.0) / len(alike)
        idle, nobody = device["idle_watts"], device["nobody"]
        node(key, "device", device["name"], kind, busy + idle + nobody, device["id"])
        device["watts"] = busy + idle + nobody
        for name, watts in (("idle", idle), ("unattributed", nobody)):
            if watts > 0:
                node(f"r:{name}", "rest", name, None, watts, name)
            link(key, f"r:{name}", kind, watts)
        if busy > 0:
            node(f"t:{kind}", "type", kind, kind, busy, "")
        link(key, f"t:{kind}", kind, busy)
    for number, (group, process, watts) in enumerate(jobs):
        key, name = f"p:{number}", process
        for kind, amount in watts.items():
            node(f"g:{group}", "group", group, None, amount, "unit")
            node(key, "process", name, None, amount, f"pid {4000 + number}")
            link(f"t:{kind}", f"g:{group}", kind, amount)
            link(f"g:{group}", key, kind, amount)
            for span, part in spans.get(process, {}).items():
                node(f"s:{process}/{span}", "span", span, None, amount * part, process)
                link(key, f"s:{process}/{span}", kind, amount * part)
    whole = sum(device["watts"] for device in devices)
    drawn = [
        {"source": source, "target": target, "type": kind, "watts": watts}
        for (source, target, kind), watts in links.items()
    ]
    return {
        "seconds": seconds,
        "joules": whole * seconds,
        "watts": whole,
        "least_watts": whole,
        "bounded": False,
        "nodes": list(nodes.values()),
        "links": drawn,
    }


def merged(links: Sequence[Json]) -> list[Json]:
    """Links between the same two nodes as one."""
    sums: dict[tuple[str, str], float] = {}
    for one in links:
        ends = one["source"], one["target"]
        sums[ends] = sums.get(ends, 0.0) + one["watts"]
    return [{"source": a, "target": b, "watts": watts} for (a, b), watts in sums.items()]


def device(key: str, name: str, kind: str, idle: float, nobody: float, **more: Any) -> Json:
    return {
        "id": key,
        "name": name,
        "type": kind,
        "provenance": "emulated",
        "present": True,
        "watts": None,
        "idle_watts": idle,
        "nobody": nobody,
        "limit_watts": None,
        "limit_default_watts": None,
        "utilisation": None,
        "celsius": None,
        "throttling": None,
        "gaps": {},
    } | more


def gpu(number: int) -> Json:
    more = {"limit_watts": 520.0 if number else 700.0, "limit_default_watts": 700.0}
    more |= {"utilisation": 0.87, "celsius": 58 + number, "throttling": ["sw_power_cap"][:number]}
    name = f"NVIDIA H100 80GB HBM3 {number}"
    return device(f"gpu:GPU-8c2a11f0-{number:04d}", name, "gpu", 74, 6, **more)


def two_packages() -> list[Json]:
    return [
        device("intel-rapl:0", "package-0", "cpu", 41, 5),
        device("intel-rapl:1", "package-1", "cpu", 40, 0),
        device("intel-rapl:0:0", "dram", "memory", 12, 1.4, gaps={"suspend": 42}),
    ]


JOBS: list[Job] = [
    ("slurm job 4711", "python train.py", {"gpu": 610, "cpu": 31, "memory": 6}),
    ("slurm job 4711", "dataloader", {"cpu": 44, "memory": 3}),
    ("slurm job 4711", "4 others", {"cpu": 3.1}),
    ("llm.service", "vllm serve", {"gpu": 288, "cpu": 12, "memory": 2.2}),
    ("postgresql.service", "postgres", {"cpu": 9.4, "memory": 0.8}),
    ("postgresql.service", "6 others", {"cpu": 2.2}),
    ("alice", "cc1plus", {"cpu": 21, "memory": 0.9}),
    ("no group", "kworker/3:1", {"cpu": 0.4}),
    ("unlisted", "unlisted", {"cpu": 0.9}),
]
SPANS = {
    "python train.py": {"train_step": 0.93, "checkpoint": 0.03, "outside spans": 0.04},
    "vllm serve": {"chat llama-3.1-70b": 0.78, "embeddings": 0.12, "outside spans": 0.1},
}


def history(devices: Sequence[Json], samples: int = HISTORY) -> Json:
    series = []
    for place, one in enumerate(devices):
        busy = one["watts"] - one["idle_watts"]
        watts: list[float | None] = []
        for sample in range(samples):
            wave = (
                0.72 + 0.2 * math.sin(sample / 43 + place) + 0.08 * math.sin(sample / 5 + 2 * place)
            )
            rest = one["idle_watts"] + one["nobody"]
            watts.append(rest + busy * wave if sample > samples / 9 else rest)
        if place == 1:
            watts[400:430] = [None] * len(watts[400:430])
        series.append(
            {key: one[key] for key in ("id", "name", "type", "provenance")} | {"watts": watts}
        )
    return {"step": STEP, "end": AT, "series": series}


def job(name: str, state: str, sentence: str, **more: Any) -> Json:
    """A job of the tuner, as ``GET /v1/tuning`` lists it."""
    service, _, span = name.partition("/")
    setting = more.pop("setting", None)
    return {
        "job": name,
        "service": service,
        "span": span,
        "knob": "gpu_power",
        "unit": "W",
        "state": state,
        "applied": True,
        "decision": {"sentence": sentence, "caps": {} if setting is None else {"gpu": setting}},
        "original": {"gpu": 700.0},
        "slowdown": None,
        "slowdown_bound": None,
        "budget": 0.05,
        "confidence": 0.95,
        "saving": None,
        "saved_surely_joules": 0.0,
        "saved_joules": None,
        "since_unix_ns": round((AT - 90) * 1e9),
    } | more


DECLARED: Json = {
    "name": "train <b>",
    "uid": 1000,
    "asked": {"max_slowdown": 0.2, "objective": None, "eta": None, "knobs": None},
    "given": {
        "mode": "apply",
        "max_slowdown": 0.05,
        "objective": "energy",
        "eta": 0.5,
        "knobs": ["gpu_power"],
    },
    "decision": "limited",
    "reason": "The budget of 20 % is limited to 5 %: the operator permits no more.",
}


def tuned() -> Json:
    held = (
        "Hold 520 W: 3.1 % slower (95 % bound 4.4 %) of a 5 % budget, 18.2 % less energy, 46 pairs."
    )
    certain = {"setting": 520.0, "slowdown": 0.031, "slowdown_bound": 0.044, "saving": 0.182}
    saved = {"saved_surely_joules": 371_000.0, "saved_joules": 412_000.0}
    declined = "Keep the original setting: certification would cost more than it could save."
    over = "Release the original: the bound of 6.2 % is over the budget of 5 %."
    cap = {"knob": "cpu_power", "enforced": 270.0, "requested": 270.0, "default": 270.0}
    return {
        "mode": "apply",
        "capper": {"answers": True},
        "jobs": [
            job("trainer/train_step", "holding", held, **certain, **saved, declared=DECLARED),
            job("llm/chat", "released", over, slowdown=0.041, slowdown_bound=0.062, setting=700.0),
            job("etl/batch", "declined", declined, applied=False),
        ],
        "caps": [cap | {"device": f"intel-rapl:{number}"} for number in (0, 1)],
    }


def spans() -> list[Json]:
    names = ("service", "name", "calls", "joules", "seconds", "output_tokens", "trace")
    rows = [
        ("trainer", "train_step", 7204, 2_170_000.0, 3458.0, 0, "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("llm", "chat llama-3.1-70b", 1893, 848_000.0, 7761.0, 1_385_621,
         "7a085853722dc6d2a3ce929d0e0e4711"),
        ("llm", "embeddings", 12_406, 130_000.0, 992.0, 6_190_476, None),
        ("trainer", "checkpoint", 12, 70_100.0, 372.0, 0, "00f067aa0ba902b74bf92f3577b34da6"),
    ]  # fmt: skip
    return [dict(zip(names, row, strict=True)) for row in rows]


def engines() -> list[Json]:
    """Serving engines: one with figures, one without, and one whose page cannot be read."""
    document = snapshot_document(engine_host(), "0.1.0")
    found: list[Json] = msgspec.to_builtins(document.engines)
    found[0]["host"] = host_energy({"gpu": 100.0, "cpu": 5.0, "memory": 1.0})
    return found


def host_energy(request: dict[str, float]) -> Json:
    """The energy on the whole host of 60 requests with 100 output tokens each, by part."""
    return {
        "method": "engine_metrics",
        "joules": {part: 60 * joules for part, joules in request.items()},
        "request_joules": request,
        "output_token_joules": {part: joules / 100 for part, joules in request.items()},
        "requests": 60,
        "tokens": {"input": 54_000, "output": 6_000},
        "part_requests": dict.fromkeys(request, 60),
        "part_output_tokens": dict.fromkeys(request, 6_000),
        "uncertainty_joules": None,
    }


def domain(one: Json) -> Json:
    """A device as a domain of the snapshot."""
    gpu = None
    if one["type"] == "gpu":
        gpu = {
            "model": one["name"],
            "utilization_ratio": one["utilisation"],
            "sm_clock_hertz": None,
            "temperature_celsius": one["celsius"],
            "throttling": one["throttling"],
            "limit_watts": one["limit_watts"],
            "default_limit_watts": one["limit_default_watts"],
        }
    return {
        "hw_id": one["id"],
        "hw_type": one["type"],
        "hw_name": one["name"],
        "in_cover": True,
        "present": one["present"],
        "silent": one["present"] and one["watts"] is None,
        "provenance": one["provenance"],
        "power_watts": one["watts"],
        "idle_power_watts": one["idle_watts"],
        "gap_seconds": one["gaps"],
        "gpu": gpu,
    }


def source(name: str, up: bool, reads: int, *failures: str, failed: int = 0) -> Json:
    return {"source": name, "up": up, "reads": reads, "failed": failed, "failures": [*failures]}


def rate(unit: str, origin: str, per_hour: float, total: float, unknown: float) -> Json:
    return {
        "unit": unit,
        "origin": origin,
        "per_hour": per_hour,
        "total": total,
        "unknown_joules": unknown,
    }


def world(devices: Sequence[Json] | None = None, jobs: Sequence[Job] = JOBS) -> Json:
    """A host at work: two GPUs, two packages, spans, a tuner; everything that can be seen."""
    devices = list(devices) if devices is not None else [gpu(0), gpu(1), *two_packages()]
    now = flow(devices, jobs, SPANS, 10.0)
    denied = "Cannot open /dev/ipmi0: permission denied; add the user to group ipmi."
    unsupported = "Cannot read the utilisation of GPU 1: the driver does not support it."
    return {
        "age": 0,
        "since": AT - 3600,
        "now": now,
        "hour": flow(
            devices,
            [(g, p, {k: w * 0.8 for k, w in by.items()}) for g, p, by in jobs],
            SPANS,
            3600.0,
        ),
        "power": history(devices),
        "hour_spans": spans(),
        "agent_cpu": 0.0078,
        "snapshot": {
            "agent_version": "0.1.0",
            "host_name": "emulated-gpu-node",
            "emulated": True,
            "at_unix_ns": round(AT * 1e9),
            "domains": [domain(one) for one in devices],
            "engines": engines(),
            "tuning": tuned(),
            "sources": [
                source("rapl", True, 36_000),
                source("nvml", True, 35_990, unsupported, failed=12),
                source("ipmi", False, 0, denied, failed=3600),
            ],
            "agent": {
                "rss_bytes": 52_428_800,
                "processes": 512,
                "ticks": 36_000,
                "missed_ticks": 3,
                "started_unix_ns": round((AT - 3600) * 1e9),
            },
            "cost": rate("EUR", "schedule", 0.42, 12.84, 0),
            "carbon": rate("g", "constant", 512.0, 15_740.0, 12_000.0),
        },
    }


def eight_gpus() -> Json:
    """A big machine: eight GPUs and sixty processes, of which the page receives the largest."""
    jobs: list[Job] = [
        ("slurm job 4711", f"rank {rank}", {"gpu": 480 + 12 * rank, "cpu": 14}) for rank in range(8)
    ]
    jobs += [("slurm job 4711", "48 others", {"cpu": 60}), *JOBS[4:]]
    return world([*(gpu(number) for number in range(8)), *two_packages()], jobs)


def quiet() -> Json:
    """A laptop that has just been started: no GPU, no spans, no tuning, no history."""
    package = device("intel-rapl:0", "package-0", "cpu", 4.1, 0.2)
    jobs: list[Job] = [("alice", "firefox", {"cpu": 3.2}), ("alice", "9 others", {"cpu": 0.6})]
    told = world([package], jobs)
    told |= {"hour": None, "hour_spans": []}
    told["now"] = flow([package], jobs, {}, 4.0)
    told["power"] = {"step": STEP, "end": AT, "series": []}
    told["snapshot"] |= {
        "emulated": False,
        "host_name": "laptop",
        "engines": [],
        "tuning": {"mode": "off", "capper": {"answers": None}, "jobs": [], "caps": []},
        "sources": told["snapshot"]["sources"][:1],
        "cost": None,
        "carbon": None,
    }
    return told


def unknown() -> Json:
    """State of an agent before its first measurement."""
    told = quiet()
    nothing = {"seconds": 0.0, "joules": 0.0, "watts": None, "nodes": [], "links": []}
    nothing |= {"least_watts": None, "bounded": False}
    told["now"] = nothing
    told["snapshot"]["domains"] = []
    return told


def blind() -> Json:
    """A host of which one GPU has not been settled for long: its current power is unknown."""
    told = world([*two_packages(), gpu(0)], [job for job in JOBS if "gpu" not in job[2]])
    for one in told["now"]["nodes"]:
        if "GPU" in one["id"]:
            one["watts"] = None
    for link in told["now"]["links"]:
        if "GPU" in link["source"]:
            link["watts"] = None
    devices = [one for one in told["now"]["nodes"] if one["layer"] == "device"]
    told["now"]["watts"] = None
    told["now"]["least_watts"] = sum(one["watts"] or 0.0 for one in devices)
    told["hour"]["bounded"] = True
    for one in told["snapshot"]["domains"]:
        if one["hw_type"] == "gpu":
            one |= {"power_watts": None, "silent": True}
    return told


IMAGE = "<img src=x onerror=\"document.title='owned'\">"
REVERSED = "\u202egnp.lexip\u202d"


def hostile() -> Json:
    """A world whose names want to be something else."""
    long = "x" * 10_000
    jobs: list[Job] = [
        (IMAGE, IMAGE, {"gpu": 300, "cpu": 10}),
        (REVERSED, REVERSED, {"gpu": 200}),
        (long, long, {"cpu": 40}),
        ("", "", {"cpu": 3}),
    ]
    devices = [gpu(0) | {"name": IMAGE}, *two_packages()]
    told = world(devices, jobs)
    snapshot = told["snapshot"]
    snapshot["host_name"] = IMAGE + long
    for number, name in enumerate((IMAGE, REVERSED, long, "")):
        told["hour_spans"][number] |= {"name": name, "service": name}
    snapshot["tuning"]["jobs"] = [job(name, "holding", name) for name in (IMAGE, REVERSED, long)]
    snapshot["sources"][1]["failures"] = [IMAGE, long]
    for engine, name in zip(snapshot["engines"], (IMAGE, REVERSED, long), strict=True):
        engine |= {"engine": name, "model": name, "owner": name, "failure": name}
    return told
