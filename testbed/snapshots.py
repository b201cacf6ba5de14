"""A snapshot with something of everything, for views and texts."""

from __future__ import annotations

from dataclasses import replace

from wattspan.model import (
    AgentStats,
    Consumer,
    Domain,
    DomainAccount,
    EngineRow,
    Failure,
    GapReason,
    GpuStatus,
    Group,
    GroupKind,
    GroupRow,
    HwType,
    Instant,
    Microjoules,
    Milliwatts,
    Nanoseconds,
    PayerInfo,
    PowerLimits,
    ProcessRow,
    Provenance,
    Remainder,
    Snapshot,
    SourceHealth,
    SpanAccounts,
    SpanRow,
    Trouble,
)

NOON = 1_700_000_000 * 10**9
J = 10**6
CPU, GPU, MEMORY = HwType.CPU, HwType.GPU, HwType.MEMORY


def account(
    identity: str,
    hw_type: HwType,
    name: str,
    watts: float | None,
    split: tuple[int, int, int],
    provenance: Provenance = Provenance.MEASURED,
) -> DomainAccount:
    """An attributed domain's account; ``split`` is processes, idle, unattributed in joules."""
    consumers, idle, unattributed = (Microjoules(part * J) for part in split)
    method = "gpu-sm-utilisation" if hw_type is GPU else "cpu-time"
    return DomainAccount(
        Domain(identity, hw_type, name, "test", provenance, resource=identity, method=method),
        energy=Microjoules(consumers + idle + unattributed),
        consumers=consumers,
        idle=idle,
        unattributed=unattributed,
        power=None if watts is None else Milliwatts(round(watts * 1000)),
    )


def process(
    pid: int, command: str, group: str, watts: dict[HwType, float], joules: dict[HwType, int]
) -> ProcessRow:
    groups = (Group(GroupKind.CONTAINER, group),) if group else ()
    return ProcessRow(
        PayerInfo(Consumer(pid, 1), command, groups),
        {kind: Microjoules(amount * J) for kind, amount in joules.items()},
        {kind: Milliwatts(round(power * 1000)) for kind, power in watts.items()},
    )


def busy_host(provenance: Provenance = Provenance.MEASURED) -> Snapshot:
    """Two packages, memory, two GPUs; a trainer, a server and other processes."""
    inner = Domain(
        "intel-rapl:0:0", CPU, "package-0-core", "rapl", provenance,
        in_cover=False, parent="intel-rapl:0", why="lies within package-0",
    )  # fmt: skip
    gpus = [
        replace(
            account(f"GPU-{n}", GPU, f"NVIDIA H100 SXM #{n}", watts, split, provenance),
            gaps={GapReason.LOST: 3_200_000_000} if n else {},
        )
        for n, (watts, split) in enumerate([(612.3, (81_000, 9_100, 420)), (71.2, (0, 9_000, 0))])
    ]
    rows = (
        process(4123, "python train.py --epochs 90", "trainer-7f9c", {CPU: 61.2, GPU: 540.1},
                {CPU: 9_120, GPU: 81_000}),
        process(4180, "tritonserver", "serving", {CPU: 22.4}, {CPU: 2_100}),
        process(902, "containerd", "containerd.service", {CPU: 0.3}, {CPU: 61}),
        process(77, "evil\x1b[31m\nname", "", {}, {CPU: 0}),
        ProcessRow(
            PayerInfo(Remainder("/build.slice"), "short-lived", ()),
            {CPU: Microjoules(310 * J)}, {CPU: Milliwatts(1200)}, alive=False,
        ),
    )  # fmt: skip
    groups = tuple(
        GroupRow(Group(kind, name), {CPU: Microjoules(uj)}, {CPU: Milliwatts(mw)})
        for kind, name, uj, mw in (
            (GroupKind.CONTAINER, "trainer-7f9c", 9_120 * J, 61_200),
            (GroupKind.CONTAINER, "serving", 2_100 * J, 22_400),
            (GroupKind.UNIT, "containerd.service", 61 * J, 300),
            (GroupKind.USER, "root", 371 * J, 1_500),
        )
    )
    denied = Failure(
        "rapl", "/sys/class/powercap/intel-rapl:1/energy_uj", Trouble.DENIED, "permission denied",
        "Give the service CAP_DAC_READ_SEARCH.",
    )  # fmt: skip
    at = Instant(10**12, NOON + 252 * 10**9)
    return Snapshot(
        at=at,
        sequence=7,
        host="node7",
        domains=(
            account("intel-rapl:0", CPU, "package-0", 84.2, (9_400, 3_000, 21), provenance),
            DomainAccount(inner, energy=Microjoules(7_100 * J), power=Milliwatts(52_000)),
            account("intel-rapl:1", CPU, "package-1", 41.7, (2_900, 3_100, 14), provenance),
            account("intel-rapl:0:1", MEMORY, "dram-0", 9.1, (900, 1_300, 0), provenance),
            *gpus,
        ),
        processes=rows,
        other={CPU: Microjoules(412 * J)},
        retired={CPU: Microjoules(95 * J)},
        groups=groups,
        provenance={CPU: provenance, GPU: provenance, MEMORY: provenance},
        gpus=(
            GpuStatus(
                "GPU-0", at, utilisation=0.97, sm_clock_hz=1_755_000_000, temperature_celsius=61,
                limits=PowerLimits(enforced=Milliwatts(700_000)), throttling=("sw_power_cap",),
            ),
        ),
        health=(SourceHealth("rapl", True, 100, 3, (denied,)),),
        stats=AgentStats(Instant(0, NOON), processes=412),
    )  # fmt: skip


def serving_host(provenance: Provenance = Provenance.MEASURED) -> Snapshot:
    """The busy host, whose applications send spans."""

    def row(
        service: str, name: str, cpu: int, gpu: int, calls: int, seconds: float, tokens: int = 0
    ) -> SpanRow:
        return SpanRow(
            service,
            name,
            {CPU: Microjoules(cpu)} | ({GPU: Microjoules(gpu)} if gpu else {}),
            Nanoseconds(round(seconds * 10**9)),
            calls,
            {"input": 4 * tokens, "output": tokens} if tokens else {},
        )

    return replace(
        busy_host(provenance),
        spans=SpanAccounts(
            rows=(
                row("trainer", "train_step", 7_900 * J, 80_100 * J, 41_220, 251.0),
                row("llm", "chat gpt-oss", 620 * J, 3_310 * J, 912, 1_333.0, 118_404),
                row("shop", "POST /checkout", 1_312_000, 0, 52, 0.91),
                row("shop", "evil\x1b[31m\nname", 12, 0, 1, 0.000_003),
                row("other", "other", 2 * J, 0, 12_345, 9.0),
            ),
            outside={
                ("trainer", "", CPU): Microjoules(31 * J),
                ("trainer", "", GPU): Microjoules(899 * J),
                ("llm", "", CPU): Microjoules(12 * J),
            },
            outcomes={"joined": 54_530, "partial": 3, "unknown_process": 7, "late": 0},
            received=54_540,
            refused={"invalid_id": 2},
        ),
    )


def engine_host() -> Snapshot:
    """The busy host with serving engines: one has figures, one has none yet, one has no page."""
    gone = Failure(
        "engine:code",
        "the page of the engine 'code' at http://127.0.0.1:8001",
        Trouble.RETRY,
        "connection refused",
        "Start the engine with its metrics, or correct `url`.",
    )
    host, read = busy_host(), SourceHealth("engine:chat", True, 20, 0)
    states = (
        read,
        SourceHealth("engine:code", False, 20, 20, (gone,)),
        replace(read, source="engine:embed"),
    )
    chat = EngineRow(
        "chat", "llama", "vllm", Microjoules(8_000 * J), {"input": 90_000, "output": 7_000}, 70,
        token_energy={"all": (82_474, 900), "input": (30_000, 9_000), "output": (700_000, 60_000)},
        request_energy=(114_285_714, 5_000_000), idle=0.25,
    )  # fmt: skip
    spans = replace(host.spans, engines=(chat,))
    return replace(host, health=(*host.health, *states), spans=spans)
