"""What the demo tunes, and what it tells of a step's cost while it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattspan.cli.demo import RECENT, StepCost, tuned_job, tuning_hint, with_tuning
from wattspan.config import Config
from wattspan.emulation.profiles import PROFILES
from wattspan.model import (
    SECOND,
    Decision,
    DecisionReason,
    Domain,
    DomainAccount,
    GapReason,
    HwType,
    Instant,
    Knob,
    Microjoules,
    Move,
    Nanoseconds,
    Provenance,
    Snapshot,
    SpanAccounts,
    SpanRow,
    TuningAccounts,
    TuningRow,
    TuningState,
)


def seen(
    at: int, steps: int, seconds: float, joules: float, service: str = "trainer", late: float = 0
) -> Snapshot:
    """What is known at second ``at``: so many steps, their time, and the energy of their board.

    The energy is settled up to so many seconds ago.
    """
    span = SpanRow(service, "train_step", {}, Nanoseconds(round(seconds * 1e9)), steps)
    board = Domain("gpu:1", HwType.GPU, "H100", "nvml", Provenance.EMULATED)
    other = replace(board, id="gpu:2")
    now = Instant(at * SECOND, 0)
    decision = Decision(Move.DECLINE, DecisionReason.WAITING, "")
    row = TuningRow(
        "job", "trainer", "train_step", Knob.GPU_POWER, TuningState.WAITING, decision, now,
        0.05, 0.95, devices=("gpu:1",),
    )  # fmt: skip
    mine = DomainAccount(
        board, Microjoules(round(joules * 1e6)), settled=Instant(round((at - late) * SECOND), 0)
    )
    return Snapshot(
        now,
        0,
        "host",
        domains=(mine, DomainAccount(other, Microjoules(at * 10**9))),
        spans=SpanAccounts(rows=(span,)),
        tuning=TuningAccounts(rows=(row,)),
    )


def test_only_the_training_job_is_tuned_and_by_the_knob_that_its_host_has() -> None:
    config = with_tuning(Config(), PROFILES["two-socket-h100"])
    assert config.autotune.mode == "apply"
    assert [(job.service, job.span) for job in config.autotune.job] == [("trainer", "train_step")]
    assert config.autotune.knobs == (Knob.GPU_POWER,)
    assert with_tuning(Config(), PROFILES["batch"]).autotune.knobs == (Knob.CPU_POWER,)


@pytest.mark.parametrize("profile", ["laptop", "serving-h100"])
def test_profile_without_training_is_not_tuned(profile: str) -> None:
    assert with_tuning(Config(), PROFILES[profile]) == Config()
    assert (tuning_hint(PROFILES[profile]), tuned_job(PROFILES[profile])) == ("", None)


def test_hint_names_the_tuned_job() -> None:
    assert tuning_hint(PROFILES["synchronous-h100"]).startswith("The agent tunes trainer: ")
    assert "at most 5% slowdown" in tuning_hint(PROFILES["two-socket-h100"])


def test_step_cost_is_compared_with_the_first_steps() -> None:
    cost = StepCost("trainer")
    told, energy, time, steps = [], 0.0, 0.0, 0
    for second in range(60):
        steps += 8
        energy += 640 if second < 30 else 560
        time += 8 * (0.125 if second < 30 else 0.130)
        told.append(cost.update(seen(second, steps, time, energy)))
    assert told[: RECENT // SECOND] == [""] * 15
    assert told[20] == "A step now needs 80.0 J in 125 ms; at first 80.0 J in 125 ms."
    assert told[-1] == "A step now needs 72.8 J in 130 ms; at first 80.0 J in 125 ms."


@pytest.mark.parametrize("turn", [-1, 1])
def test_step_cost_does_not_depend_on_settlement_delay(turn: int) -> None:
    cost, told = StepCost("trainer"), []
    for second in range(90):
        late = 3 + turn * min(2, max(0, second - 40) / 2)
        told.append(cost.update(seen(second, 8 * second, second, 640 * (second - late), late=late)))
    one = "80.0 J in 125 ms"
    assert set(told) == {"", f"A step now needs {one}; at first {one}."}
    assert "" not in told[40:], "nor is anything missed"


def test_step_cost_is_unknown_without_energy() -> None:
    cost = StepCost("trainer")

    def tell(seconds: range, gap: float = 0, *, settled: bool = True) -> set[str]:
        told = set()
        for second in seconds:
            known = 100 + min(second - 100, 20) if gap else second
            snapshot = seen(second, 8 * second, second, 640 * known)
            mine, other = snapshot.domains
            lost = {GapReason.LOST: (second - known) * SECOND}
            mine = replace(mine, gaps=lost, settled=mine.settled if settled else None)
            told.add(cost.update(replace(snapshot, domains=(mine, other))))
        return told

    assert tell(range(30), settled=False) == {""}
    assert tell(range(100, 120)) >= {
        "A step now needs 80.0 J in 125 ms; at first 80.0 J in 125 ms."
    }
    assert tell(range(121, 130), gap=1) == {
        "A step now needs 80.0 J in 125 ms; at first 80.0 J in 125 ms."
    }, "the time of a gap is none of little power"
    assert "" in tell(range(130, 160), gap=1)


def test_step_cost_is_empty_without_steps() -> None:
    cost = StepCost("trainer")
    assert cost.update(replace(seen(0, 1, 1, 1), spans=SpanAccounts())) == ""
    assert cost.update(seen(1, 9, 1.0, 1.0, service="other")) == ""
    assert cost.update(replace(seen(2, 9, 1.0, 1.0), tuning=TuningAccounts())) == ""
    for second in range(3, 30):
        assert cost.update(seen(second, 10, 1.2, 800)) == "", "none has ended"
