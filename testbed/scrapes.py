"""A snapshot with every metric, and prometheus-client's parse of a scrape.

``python -m testbed.scrapes`` rewrites the golden scrapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from testbed.requirements import ROOT
from testbed.snapshots import CPU, GPU, MEMORY, NOON, account, process
from wattspan.model import (
    AgentStats,
    CapKey,
    CapperFigures,
    CapRow,
    Consumer,
    Decision,
    DecisionReason,
    DevicePod,
    Domain,
    DomainAccount,
    EngineRow,
    Exemplar,
    Failure,
    Footprint,
    GapReason,
    GpuStatus,
    Group,
    GroupKind,
    GroupRow,
    HostRequests,
    HwType,
    InferenceRow,
    Instant,
    Knob,
    KnobState,
    LoadFigures,
    Microjoules,
    Milliwatts,
    Move,
    Nanoseconds,
    ObjectiveFigures,
    PayerInfo,
    PowerLimits,
    ProcessRow,
    Provenance,
    RatedEnergy,
    RateOrigin,
    Remainder,
    Snapshot,
    SourceHealth,
    SpanAccounts,
    SpanRow,
    StaticBasis,
    StaticSplit,
    Trouble,
    TuningAccounts,
    TuningRow,
    TuningState,
    UnmeteredRow,
)
from wattspan.model.snapshot import FleetAccounts, FleetPlace
from wattspan_exporters.catalogue import CATALOGUE
from wattspan_exporters.catalogue.definition import counters
from wattspan_exporters.prometheus.renderer import ExpositionFormat, Renderer

CATALOGUE_SERIES = {one.series for metric in CATALOGUE for one in counters(metric)}
"""The names of the samples of all metrics of the catalogue."""

GOLDEN = {
    ExpositionFormat.TEXT: ROOT / "tests" / "fixtures" / "scrape.txt",
    ExpositionFormat.OPENMETRICS: ROOT / "tests" / "fixtures" / "scrape.openmetrics.txt",
}

Series = tuple[str, frozenset[tuple[str, str]]]


def parse(document: bytes, form: ExpositionFormat) -> dict[Series, float]:
    """Every sample of a scrape; AssertionError if a series is there twice."""
    text = document.decode()
    if form is ExpositionFormat.OPENMETRICS:
        families = openmetrics_parser.text_string_to_metric_families(text)
    else:
        families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    found = {(s.name, frozenset(s.labels.items())): s.value for s in samples}
    assert len(found) == len(samples), "a series is there twice"
    return found


def value(scrape: Mapping[Series, float], name: str, **labels: str) -> float:
    """The value of the only series of ``name`` that has ``labels``."""
    wanted = labels.items()
    found = {key: v for key, v in scrape.items() if key[0] == name and wanted <= key[1]}
    assert len(found) == 1, f"{name} {labels}: {list(found)}"
    return next(iter(found.values()))


def total(scrape: Mapping[Series, float], name: str, **labels: str) -> float:
    """The sum of all series of ``name`` with ``labels``; a label "" must be absent."""
    absent = {key for key, v in labels.items() if v == ""}
    wanted = {key: v for key, v in labels.items() if v}.items()
    return sum(
        v
        for (series, pairs), v in scrape.items()
        if series == name and wanted <= pairs and not absent & dict(pairs).keys()
    )


def full_host() -> Snapshot:
    """Every metric has a series here, and most have awkward ones."""
    at = Instant(10**12, NOON)
    core = Domain(
        "intel-rapl:0:0", CPU, "core", "rapl", Provenance.MEASURED,
        in_cover=False, parent="intel-rapl:0",
    )  # fmt: skip
    psys = Domain("intel-rapl:2", HwType.ENCLOSURE, "psys", "rapl", Provenance.MEASURED, False)
    package = replace(
        account("intel-rapl:0", CPU, "package-0", 84.2, (9_400, 3_000, 21)),
        energy=Microjoules(12_421_123_456),
        consumers=Microjoules(9_400_123_456),
        pending=Microjoules(7),
        idle_power=Milliwatts(31_005),
        idle_power_error=Milliwatts(1_250),
        gaps={GapReason.SUSPEND: 3_600_000_000_001},
    )
    gpus = tuple(
        account(f"GPU-{n}", GPU, f"H100 #{n}", watts, split, Provenance.DERIVED)
        for n, (watts, split) in enumerate([(612.3, (81_000, 9_100, 420)), (71.2, (0, 9_000, 0))])
    )
    rows = (
        process(4123, "python", "trainer-7f9c", {}, {CPU: 9_120, GPU: 81_000}),
        process(77, 'quo"te\\back\nline', "", {}, {CPU: 0}),
        ProcessRow(
            PayerInfo(Remainder("/build.slice"), "short-lived", (Group(GroupKind.UNIT, "build"),)),
            {CPU: Microjoules(280_123_456)}, {},
        ),
        ProcessRow(PayerInfo(Consumer(9, 5), "x" * 300), {MEMORY: Microjoules(1)}, {}),
    )  # fmt: skip
    denied = Failure("rapl", "energy_uj", Trouble.DENIED, "permission denied")
    status = GpuStatus(
        "GPU-0", at,
        power_average=Milliwatts(611_000), power_instant=Milliwatts(640_500),
        limits=PowerLimits(*map(Milliwatts, (200_000, 700_000, 700_000, 650_000, 650_000))),
        sm_clock_hz=1_755_000_000, memory_clock_hz=2_619_000_000,
        utilisation=0.97, memory_utilisation=0.4, temperature_celsius=61,
        memory_used=63 * 2**30, memory_total=80 * 2**30,
        throttled={"sw_power_cap": 12_345_678_901, "hw_thermal": 0}, throttling=("sw_power_cap",),
        mig=False, integrated_energy=Microjoules(99_000_000),
        counter_energy=Microjoules(100_000_000), energy_basis="counter", energy_disagrees=False,
        model="NVIDIA H100 80GB HBM3", driver="570.86.10",
    )  # fmt: skip
    return Snapshot(
        at=at,
        sequence=7,
        host="node7",
        domains=(
            package,
            DomainAccount(core, energy=Microjoules(7_100_000_001), power=Milliwatts(52_000)),
            DomainAccount(psys, energy=Microjoules(99_000_000_000)),
            replace(account("intel-rapl:0:1", MEMORY, "dram", 9.1, (900, 1_300, 0)), present=False),
            *gpus,
        ),
        processes=rows,
        other={CPU: Microjoules(0), MEMORY: Microjoules(899_999_999)},
        retired={},
        groups=(GroupRow(Group(GroupKind.CONTAINER, "trainer-7f9c"), {CPU: Microjoules(5)}, {}),),
        provenance={CPU: Provenance.MEASURED, GPU: Provenance.DERIVED, MEMORY: Provenance.MEASURED},
        gpus=(status, GpuStatus("GPU-1", at)),
        health=(SourceHealth("rapl", True, 100, 3, (denied,), 1_234_567, 4_321),),
        spans=spans(),
        tuning=tuning(),
        device_pods=(
            DevicePod("GPU-0", "ml", "trainer-0", "main"),
            DevicePod("MIG-absent", "ml", "other", "main"),
        ),
        fleet=FleetAccounts(
            allotment=1_200_000, safe=900_000, demand=1_150_500, in_contact=True, leads=True,
            leader="node7",
            places=(
                FleetPlace("", 4_000_000, 3, 3_450_000, 3_300_000, 2_700_000, 3_900_000),
                FleetPlace("row-1", None, 3, 3_450_000, 3_300_000, 2_700_000, 3_900_000),
            ),
        ),
        footprint=Footprint(
            RatedEnergy("EUR", RateOrigin.SCHEDULE, 312_500_000, 41_250_000_001, Microjoules(7)),
            RatedEnergy("g", RateOrigin.CONSTANT, 380 * 10**9, 12_873_456_789_012, Microjoules(0)),
        ),
        ramps={10**9: 212_500, 10 * 10**9: 20_125, 60 * 10**9: 0},
        stats=AgentStats(
            Instant(0, NOON - 10**9), interval=10**8, demands={"spans": 2, "windows": 0},
            ticks=10, missed_ticks=1, cpu_seconds=1.25, rss_bytes=31_000_000,
            processes=412, late_usages=2, dropped_history=3,
            exporter_drops={"otlp": 4}, refusals={("prometheus", "token"): 5, ("http", "tls"): 0},
            pool_refusals={("open_spans", "displaced"): 3},
            pools_used={"open_spans": 0.25},
        ),
    )  # fmt: skip


def spans() -> SpanAccounts:
    """A server of a language model with exemplars, an awkward name, and the row of all others."""
    shown = Exemplar(
        "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", Microjoules(412_000_001),
        NOON - 3_250_000_000,
    )  # fmt: skip
    return SpanAccounts(
        rows=(
            SpanRow(
                "llm", "chat", {CPU: Microjoules(120_000_000), GPU: Microjoules(40_000_000_000)},
                Nanoseconds(93_000_000_007), 400, {"input": 51_200, "output": 80_000},
                {GPU: shown, CPU: shown._replace(energy=Microjoules(7))},
                {
                    StaticBasis.FITTED: StaticSplit(
                        Microjoules(9_000_000_001), Microjoules(30_000_000_000)
                    ),
                    StaticBasis.LOWER_BOUND: StaticSplit(Microjoules(0), Microjoules(7)),
                },
            ),
            SpanRow("shop", 'GET "/é"\\\n', {CPU: Microjoules(1)}, Nanoseconds(5), 1),
            SpanRow("other", "other", {CPU: Microjoules(0)}, Nanoseconds(0), 12),
        ),
        outside={("llm", "", CPU): Microjoules(9_000_000), ("llm", "", GPU): Microjoules(0)},
        outcomes={"joined": 410, "partial": 3, "late": 0, "unknown_process": 2},
        received=420, refused={"invalid_id": 1}, forwarded=399, forward_drops={"full": 4},
        forward_queue=4096, open=2, deferred=512, forward_repeats=6, announcers=3,
        announcers_refused={"no_room": 1, "protocol": 0}, announcements_lost=7,
        announcements_conflicts=2,
        inference=(
            InferenceRow(
                "llm", "meta-llama/Llama-3.1-8B",
                {"input": Microjoules(9_100_000_001), "output": Microjoules(30_400_000_000)},
                {"input": 51_200, "output": 80_000}, {"model": 391, "tokens": 9},
                (0, 0, 1, 4, 31, 96, 214, 380, 400, 400, 400),
                host=HostRequests(
                    {
                        "gpu": Microjoules(39_000_000_001), "cpu": Microjoules(3_100_000_000),
                        "memory": Microjoules(410_000_000), "idle": Microjoules(5_200_000_009),
                    },
                    {"input": 51_000, "output": 79_000}, 396,
                    (0, 0, 0, 2, 28, 90, 207, 371, 396, 396, 396),
                ),
            ),
        ),
        inference_idle=Microjoules(310_000_007), inference_waiting=6,
        inference_host_idle={"cpu": Microjoules(21_000_000), "memory": Microjoules(0)},
        unmetered=(
            UnmeteredRow("shop", "gpt-5", "client", 12, {"input": 9_000, "output": 700}),
        ),
        engines=(
            EngineRow(
                "chat",
                "llama",
                "vllm",
                Microjoules(8_000_000_000),
                {"input": 90_000, "output": 7_000},
                70,
                {"all": (82_474, 900), "input": (30_000, 9_000), "output": (700_000, 60_000)},
                (114_285_714, 5_000_000),
                0.25,
                HostRequests(
                    {"gpu": Microjoules(7_900_000_000), "cpu": Microjoules(600_000_007)},
                    {"input": 89_000, "output": 6_900}, 69,
                ),
                ("llm",),
            ),
        ),
    )  # fmt: skip


def tuning() -> TuningAccounts:
    """Jobs that are held, declined (with an awkward name) and tracked, and caps of every kind."""
    at = Instant(10**12, NOON)
    hold = Decision(Move.HOLD, DecisionReason.CERTIFIED, "Hold 560 W.", {"GPU-0": 560_000})
    held = TuningRow(
        "trainer/train_step", "trainer", "train_step", Knob.GPU_POWER, TuningState.HOLDING, hold,
        at, 0.05, 0.95, ("GPU-0",), applied=True, slowdown=0.027, slowdown_bound=0.0391,
        held_slowdown=0.031, held_bound=0.044, saving=0.182, saved=Microjoules(1_250_000_001),
        saved_low=Microjoules(-4_000_000), saved_high=Microjoules(1_500_000_000),
        saved_surely=Microjoules(900_000_007), exploration=Nanoseconds(11_000_000_009), pairs=46,
        units=5_210, committed=Nanoseconds(412_000_000_000), lost=Nanoseconds(40_000_000_000),
        decisions={(Move.PROBE, DecisionReason.SCREENING): 7,
                   (Move.HOLD, DecisionReason.CERTIFIED): 2,
                   (Move.RELEASE, DecisionReason.OVER_BUDGET): 1},
        allowance=Nanoseconds(81_000_000_000),
    )  # fmt: skip
    decline = Decision(Move.DECLINE, DecisionReason.NO_SIGNAL, "No unit of work was seen.")
    declined = TuningRow(
        'quo"te\\back\nline' + "é" * 200, "llm", "", Knob.CPU_POWER, TuningState.DECLINED, decline,
        at, 0.02, 0.95, decisions={(Move.DECLINE, DecisionReason.NO_SIGNAL): 1},
    )  # fmt: skip
    learn = Decision(Move.PROBE, DecisionReason.CERTIFYING, "Certify 1590 MHz at this load.")
    tracked = TuningRow(
        "llm/chat", "llm", "chat", Knob.GPU_CLOCK, TuningState.EXPLORING, learn, at, 0.0, 0.95,
        load=LoadFigures(12.5, 4, 16.0, 1.25, (ObjectiveFigures("ttft_p99", 0.4, 0.01, 400, 3),)),
    )  # fmt: skip
    power, clock, package = (
        CapKey(Knob.GPU_POWER, "GPU-0"),
        CapKey(Knob.GPU_CLOCK, "GPU-0"),
        CapKey(Knob.CPU_POWER, "intel-rapl:0"),
    )
    return TuningAccounts(
        "apply",
        (held, declined, tracked),
        (
            CapRow(
                KnobState(power, "H100 #0", 200_000, 700_000, 700_000, 560_000, 560_000),
                original=700_000, wanted=560_000, ceiling=600_000, holder="trainer/train_step",
                why="Hold 560 W.", since=at, expires=10**12 + 10**10,
            ),
            CapRow(
                KnobState(clock, "H100 #0", maximum=1_980), wanted=1_500, holder="operator",
                why="Asked for.", since=at,
            ),
            CapRow(
                KnobState(package, "package-0", 0, 250_000, 250_000, 180_000, 180_000),
                original=250_000, wanted=150_000, holder="budget", foreign=True,
            ),
            CapRow(
                KnobState(CapKey(Knob.GPU_POWER, "GPU-1"), "H100 #1"), usable=False,
                trouble="no permission",
            ),
        ),
        capper=CapperFigures(True, "", writes=31, restores=2), ceiling=1_200_000,
        forwarded=88, forward_drops={"queue_full": 3},
    )  # fmt: skip


def main() -> None:
    for form, path in GOLDEN.items():
        path.write_bytes(Renderer().render(full_host(), form))


if __name__ == "__main__":
    main()
