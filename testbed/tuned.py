"""Jobs that are tuned, for views, texts and answers: an example of each state."""

from __future__ import annotations

from dataclasses import replace

from wattspan.model import (
    SECOND,
    CapKey,
    CapperFigures,
    CapRow,
    Decision,
    DecisionReason,
    DeclarationOutcome,
    DeclaredTerms,
    Instant,
    JobPartner,
    Knob,
    KnobState,
    LoadBinFigures,
    LoadFigures,
    Microjoules,
    Move,
    Nanoseconds,
    ObjectiveFigures,
    PipelineFigures,
    PipelineRankFigures,
    RecordedDecision,
    RequestedTerms,
    SettingResult,
    TuningAccounts,
    TuningRow,
    TuningState,
    TuningTerms,
)

NOW = Instant(10**12, 1_700_000_000 * 10**9)
W = 1000
J = 10**6
GPUS = ("GPU-0", "GPU-1")


def ago(seconds: float) -> Instant:
    return Instant(NOW.mono - round(seconds * 1e9), NOW.wall - round(seconds * 1e9))


HOLD = Decision(
    Move.HOLD,
    DecisionReason.CERTIFIED,
    "Hold 560 W: 3.1 % slower (95 % bound 4.4 %) of a 5 % budget, 18.2 % less energy, 46 pairs.",
    dict.fromkeys(GPUS, 560 * W),
    {"slowdown": 0.031, "bound": 0.044, "pairs": 46.0},
)

HELD = TuningRow(
    job="trainer/train_step",
    service="trainer",
    span="train_step",
    knob=Knob.GPU_POWER,
    state=TuningState.HOLDING,
    decision=HOLD,
    since=ago(723),
    budget=0.05,
    confidence=0.95,
    devices=GPUS,
    applied=True,
    slowdown=0.024,
    slowdown_bound=0.031,
    held_slowdown=0.031,
    held_bound=0.044,
    saving=0.182,
    saved=Microjoules(12_345 * J),
    saved_low=Microjoules(9_800 * J),
    saved_high=Microjoules(14_900 * J),
    saved_surely=Microjoules(9_900 * J),
    exploration=Nanoseconds(8 * SECOND),
    pairs=46,
    units=4_120,
    committed=Nanoseconds(252 * SECOND),
    decisions={(Move.PROBE, DecisionReason.SCREENING): 4, (Move.HOLD, DecisionReason.CERTIFIED): 1},
    tried=(
        SettingResult(650 * W, 0.008, 0.019, 0.051, 3),
        SettingResult(600 * W, 0.017, 0.029, 0.121, 3),
        SettingResult(560 * W, 0.031, 0.044, 0.182, 46, True),
        SettingResult(520 * W, 0.062, 0.077, 0.22, 3),
    ),
    lost=Nanoseconds(12_100_000_000),
    allowance=Nanoseconds(30_400_000_000),
    original=dict.fromkeys(GPUS, 700 * W),
)

DECLARED = DeclaredTerms(
    "chat server",
    1000,
    RequestedTerms(0.2, "cost", 0.8, (Knob.GPU_POWER, Knob.GPU_CLOCK)),
    TuningTerms("apply", 0.05, "cost", 0.8, (Knob.GPU_POWER,)),
    DeclarationOutcome.LIMITED,
    "The budget of 20 % is limited to 5 %: the operator permits no more ([autotune] declared is "
    '"tighten"); gpu_clock is not in [autotune] knobs (gpu_power).',
)

PROBED = replace(
    HELD,
    job="llm/chat",
    service="llm",
    span="chat",
    state=TuningState.EXPLORING,
    decision=Decision(
        Move.PROBE,
        DecisionReason.SCREENING,
        "Try 285 W for 20 units: the draw is 301 W.",
        {"GPU-2": 285 * W},
    ),
    since=ago(4.2),
    devices=("GPU-2",),
    slowdown=0.001,
    slowdown_bound=None,
    held_slowdown=None,
    held_bound=None,
    saving=None,
    saved=None,
    saved_low=None,
    saved_high=None,
    saved_surely=Microjoules(0),
    pairs=2,
    units=310,
    committed=None,
    tried=(SettingResult(285 * W, None, None, None, 2),),
    lost=None,
    allowance=None,
    original={"GPU-2": 300 * W},
    declared=DECLARED,
)

TRACKED = replace(
    PROBED,
    job="llm/POST /chat",
    span="POST /chat",
    knob=Knob.GPU_CLOCK,
    state=TuningState.HOLDING,
    decision=Decision(
        Move.HOLD,
        DecisionReason.CERTIFIED,
        "Hold 1590 MHz: load 11.3, load bin up to 16, certified up to 2.8 times the "
        "load; 0.5 % of 1200 requests over the limit ttft_p99.",
        {"GPU-2": 1590},
    ),
    budget=0.0,
    slowdown=None,
    saving=0.21,
    saved=Microjoules(900 * J),
    pairs=0,
    units=1210,
    tried=(),
    original={"GPU-2": 1980},
    declared=None,
    load=LoadFigures(
        11.3,
        4,
        16.0,
        2.8,
        (
            ObjectiveFigures("ttft_p99", 0.4, 0.01, 1200, 6),
            ObjectiveFigures("tbt_p99", 0.1, 0.01),
        ),
        (
            LoadBinFigures(2, 4.0, 1185, 900, True, 1.6, 1.9),
            LoadBinFigures(3, 8.0, 1185, 2000, True, 1.1, 1.4),
            LoadBinFigures(4, 16.0, 1590, 1200, True, 0.8, 1.0),
            LoadBinFigures(5, 32.0, 1590, 600, True, 0.6, 0.75),
            LoadBinFigures(6, 64.0, 1980, 40, False, 0.5, 0.5),
        ),
    ),
)

PLANNED = "The ranks have 1980 1485 MHz: +0.41% time per iteration, at most +0.93%."
FOLLOWED = (
    "Another pipeline takes 1.17 s per iteration, and this one waits for it: its ranks have 1635 "
    "1125 MHz meanwhile."
)

PIPELINED = replace(
    PROBED,
    job="gpt/iteration",
    service="gpt",
    span="iteration",
    knob=Knob.GPU_CLOCK,
    state=TuningState.HOLDING,
    decision=Decision(
        Move.HOLD,
        DecisionReason.STRAGGLER,
        f"Pipeline dp-0: {FOLLOWED}",
        {"GPU-0": 1635, "GPU-1": 1125, "GPU-3": 1485},
    ),
    budget=0.01,
    devices=("GPU-0", "GPU-1", "GPU-2", "GPU-3"),
    tried=(),
    original={f"GPU-{number}": 1980 for number in range(4)},
    declared=None,
    pipelines=(
        PipelineFigures(
            "dp-0",
            Move.HOLD,
            DecisionReason.STRAGGLER,
            FOLLOWED,
            Nanoseconds(1_160_000_000),
            Nanoseconds(931_000_000),
            Nanoseconds(1_170_000_000),
            0.041,
            (
                PipelineRankFigures("GPU-0", 1635, 1635, 0.121, Microjoules(5_310 * J)),
                PipelineRankFigures("GPU-1", 1980, 1125, 0.302, Microjoules(-12 * J)),
            ),
        ),
        PipelineFigures(
            "dp-1",
            Move.HOLD,
            DecisionReason.CERTIFIED,
            PLANNED,
            ranks=(
                PipelineRankFigures("GPU-2", 1980, 1980, 0.05),
                PipelineRankFigures("GPU-3", None),
            ),
        ),
    ),
    partners=(
        JobPartner("", used=False, sentence="No etcd member decides."),
        JobPartner(
            "host-2",
            used=True,
            sentence="Its pipeline dp-2 takes 1.17 s.",
            age=Nanoseconds(1_200_000_000),
            straggler="dp-2",
        ),
    ),
)

DECLINED = replace(
    PROBED,
    job="shop/POST /checkout",
    service="shop",
    span="POST /checkout",
    state=TuningState.DECLINED,
    decision=Decision(Move.DECLINE, DecisionReason.NO_DEVICE, "No GPU works for it."),
    since=ago(65),
    devices=(),
    applied=False,
    slowdown=None,
    pairs=0,
    units=52,
    tried=(),
    original={},
    declared=None,
)


def cap(device: str, holder: str = "", **changes: object) -> CapRow:
    asked = 560 * W if holder else 700 * W
    state = KnobState(
        CapKey(Knob.GPU_POWER, device),
        f"NVIDIA H100 SXM #{device[-1]}",
        200 * W,
        700 * W,
        700 * W,
        asked,
        asked,
        aliases=(device[-1], "00000000:01:00.0"),
    )
    held: dict[str, object] = {}
    if holder:
        held = {
            "original": 700 * W,
            "wanted": 560 * W,
            "holder": holder,
            "why": HOLD.sentence,
            "since": ago(723),
            "expires": NOW.mono + 9 * SECOND,
        }
    return replace(CapRow(state), **(held | changes))  # type: ignore[arg-type]


ACCOUNTS = TuningAccounts(
    mode="apply",
    rows=(HELD, PROBED, DECLINED),
    caps=(
        cap("GPU-0", HELD.job),
        cap("GPU-1", HELD.job),
        cap("GPU-2", foreign=True),
        cap("GPU-3", usable=False, trouble="the driver refuses it"),
    ),
    capper=CapperFigures(True, "", writes=9, restores=2),
    ceiling=2_400 * W,
)


def decided(seconds_ago: float, decision: Decision, job: str = HELD.job) -> RecordedDecision:
    return RecordedDecision(ago(seconds_ago), job, Knob.GPU_POWER, decision, True)


RELEASE = Decision(
    Move.RELEASE, DecisionReason.OVER_BUDGET, "Release: 8.2 % slower than the original, of 5 %."
)
PROBE = replace(
    HOLD, move=Move.PROBE, reason=DecisionReason.CERTIFYING, sentence="Try 560 W for sure."
)
