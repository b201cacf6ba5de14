"""Sentences about tuning."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import astuple
from testbed.tuned import (
    ACCOUNTS,
    DECLARED,
    DECLINED,
    FOLLOWED,
    HELD,
    NOW,
    PIPELINED,
    PROBED,
    RELEASE,
    TRACKED,
    W,
    cap,
    decided,
)

from wattspan.cli.tune.explanation import (
    REASON_EXPLANATIONS,
    TRACKING_EXPLANATIONS,
    cap_text,
    explain_facts,
    explain_lines,
    meaning,
    why_not_higher,
    why_not_lower,
)
from wattspan.cli.tune.text import (
    NOT_TRACKED,
    against_original,
    budget_text,
    decision_text,
    history_lines,
    load_sentences,
    percent,
    pipeline_lines,
    recommendation_facts,
    recommendation_lines,
    saved_text,
    signed_joules,
    status_lines,
)
from wattspan.model import (
    CapRow,
    Decision,
    DecisionReason,
    JobPartner,
    Knob,
    Microjoules,
    Move,
    Nanoseconds,
    RequestedTerms,
    SettingResult,
    TuningAccounts,
    TuningRow,
)

# ------------------------------------------------------------------------------------ reasons


def test_every_reason_is_explained_in_sentences() -> None:
    for reason in DecisionReason:
        explained = REASON_EXPLANATIONS[reason]
        for sentence in (meaning(reason), explained.then, *filter(None, [explained.do])):
            assert sentence[0].isupper() or sentence.startswith("`"), reason
            assert len(sentence) > 1
            assert sentence.endswith("."), reason


# ------------------------------------------------------------------------------------ figures


def test_shares_are_percentages_and_unknown_is_a_dash() -> None:
    assert [percent(part) for part in (0.0312, -0.004, -0.0001, 0.0, 1.5, None)] == [
        *("3.1%", "-0.4%", "0.0%", "0.0%", "150.0%", "-"),
    ]
    assert [budget_text(part) for part in (0.05, 0.025, 1.0, 0.999)] == [
        "5%",
        "2.5%",
        "100%",
        "99.9%",
    ]


def test_passed_knobs_are_shown_with_their_reasons() -> None:
    passed = replace(HELD, passed_knobs={Knob.CPU_POWER: DecisionReason.NOT_BINDING})
    sentence = "cpu_power is not tuned: the job draws less than the lowest permitted cap."
    assert decision_text(passed) == f"{HELD.decision.sentence} {sentence}"
    assert f"  {sentence}" in explain_lines(passed, ACCOUNTS, NOW, None)
    assert "is not tuned" not in "\n".join(explain_lines(HELD, ACCOUNTS, NOW, None))


def test_setting_is_shown_relative_to_the_original() -> None:
    assert against_original(HELD) == "560 of 700 W"
    ranks = replace(HELD.decision, caps={"GPU-0": 560 * W, "GPU-1": 512_500})
    assert against_original(replace(HELD, decision=ranks)) == "512.5-560 of 700 W"
    clock = replace(
        HELD,
        knob=Knob.GPU_CLOCK,
        decision=replace(HELD.decision, caps={"GPU-0": 1410}),
        original={"GPU-0": 1980},
    )
    assert against_original(clock) == "1410 of 1980 MHz"


def test_missing_original_is_taken_from_the_caps() -> None:
    row = replace(HELD, original={})
    assert against_original(row) == "560 W"
    assert against_original(row, ACCOUNTS.caps) == "560 of 700 W"
    released = replace(row, decision=RELEASE, devices=("GPU-2",))
    assert against_original(released, ACCOUNTS.caps) == "700 W"
    assert against_original(replace(released, devices=("GPU-9",)), ACCOUNTS.caps) == "-"


def test_negative_savings_have_a_sign() -> None:
    lost = replace(HELD, saved=Microjoules(-5_000_000), saved_low=Microjoules(-8_000_000))
    assert saved_text(lost) == "-5.00 J (-8.00 J to 14.9 kJ)"
    assert signed_joules(0) == "0.00 J"
    assert saved_text(DECLINED) == "-"


# ------------------------------------------------------------------------------------- status


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160, 240, None])
def test_table_fits_the_terminal_width(width: int | None) -> None:
    lines = list(status_lines(ACCOUNTS, NOW, width))
    table = [line for line in lines[2:] if not line.startswith("  ")]
    assert len(table) == 4
    if width is not None and width >= 80:
        assert all(len(line) <= width for line in lines[2:])
    if width is None:
        assert len(lines) == 6
        assert table[0].endswith("SINCE")


def test_job_without_figures_shows_dashes() -> None:
    accounts = replace(ACCOUNTS, rows=(DECLINED,))
    line = list(status_lines(accounts, NOW, None))[-1]
    assert line.split("POST /checkout")[1].split()[:7] == [
        *("declined", "-", "-", "-", "5%", "-", "-"),
    ]


def test_advice_mode_states_that_no_limit_is_written() -> None:
    first, *_ = status_lines(TuningAccounts("advise"), NOW, None)
    assert first == "advise: no limit is written"


def test_job_that_is_only_advised_on_is_not_called_declined() -> None:
    advice = Decision(Move.DECLINE, DecisionReason.ADVICE, "Advice: try 560 W first.")
    row = replace(DECLINED, decision=advice)
    line = list(status_lines(replace(ACCOUNTS, rows=(row,)), NOW, None))[-1]
    assert "advice" in line.split()
    assert "declined" not in line


def test_clock_that_is_behind_tells_no_negative_age() -> None:
    late = replace(HELD, since=NOW._replace(mono=NOW.mono + 10**9))
    assert "0.0 s" in list(status_lines(replace(ACCOUNTS, rows=(late,)), NOW, None))[-1]


# ------------------------------------------------------------------------------------ explain


def held(*tried: SettingResult) -> TuningRow:
    return replace(HELD, tried=(HELD.tried[2], *tried))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            SettingResult(520 * W, 0.062, 0.077, 0.22, 3),
            "Not lower: 520 W was 6.2% slower (95% bound 7.7%), more than the budget of 5%.",
        ),
        (
            SettingResult(520 * W, 0.04, 0.049, 0.15, 20),
            "Not lower: 520 W saves 15.0% of the energy, 560 W 18.2%.",
        ),
        (
            SettingResult(520 * W, 0.04, 0.061, 0.2, 5),
            "Not lower: 520 W was 4.0% slower (95% bound 6.1%), and the bound is above the budget"
            " of 5%.",
        ),
        (
            SettingResult(520 * W, pairs=1),
            "Not lower: 520 W was not compared long enough.",
        ),
        (
            SettingResult(520 * W, 0.04, None, None, 5),
            "Not lower: 520 W was 4.0% slower after 5 pairs, and was not certified.",
        ),
    ],
    ids=["over budget", "saves less", "bound over budget", "unknown", "not proved"],
)
def test_reason_against_lower_is_the_nearest_lower_trial(
    other: SettingResult, sentence: str
) -> None:
    assert why_not_lower(held(other, SettingResult(400 * W, 0.3, 0.4, 0.1, 3))) == sentence


def test_reason_against_higher_is_the_next_higher_saving() -> None:
    assert why_not_higher(HELD, ACCOUNTS) == (
        "Not higher: 600 W saves 12.1% of the energy, 560 W 18.2%."
    )
    assert why_not_higher(held(), ACCOUNTS) == (
        "Not higher: no setting between it and the original, 700 W, was tried."
    )
    assert why_not_higher(replace(HELD, decision=RELEASE), ACCOUNTS) == ""


def test_setting_that_the_original_is_compared_with_just_now_is_the_one_explained() -> None:
    comparing = Decision(
        Move.PROBE, DecisionReason.CERTIFYING, "Certify 560 W.", {}, {"setting": 560.0 * W}
    )
    row = replace(HELD, decision=comparing)
    told = "\n".join(explain_lines(row, ACCOUNTS, NOW, None))
    assert "The original, 700 W, to compare 560 W with it." in told
    assert "Not lower: 520 W" in told
    assert "Not higher: 600 W" in told
    learning = replace(comparing, reason=DecisionReason.BASELINE, shown={"setting": 700.0 * W})
    assert why_not_higher(replace(HELD, decision=learning), ACCOUNTS) == ""


def test_original_setting_explains_only_lower_settings() -> None:
    row = replace(HELD, decision=RELEASE, tried=(SettingResult(650 * W, 0.07, 0.09, 0.05, 3),))
    assert why_not_lower(row).startswith("Not lower: 650 W was 7.0% slower")
    assert why_not_lower(replace(row, tried=())) == ""
    elsewhere = Decision(Move.RELEASE, DecisionReason.FOREIGN_WRITER, "Release 560 W.")
    assert why_not_lower(replace(row, decision=elsewhere)) == ""


def test_faster_setting_is_named_faster() -> None:
    row = replace(HELD, slowdown=-0.012, slowdown_bound=0.001)
    told = "\n".join(explain_lines(row, ACCOUNTS, NOW, None))
    assert "The whole run: 1.2% faster (95% bound 0.1%) of a budget of 5%." in told
    one = held(SettingResult(520 * W, -0.004, None, None, 1))
    assert why_not_lower(one) == (
        "Not lower: 520 W was 0.4% faster after one pair, and was not certified."
    )


def test_ledger_tells_no_figure_that_is_not_known() -> None:
    told = "\n".join(explain_lines(replace(PROBED, slowdown=None), ACCOUNTS, NOW, 80))
    assert "Lost by measuring settings: 8.0 s." in told
    assert "The whole run" not in told
    assert "Saved" not in told
    gained = replace(HELD, lost=Nanoseconds(-5), allowance=None)
    assert "Lost so far: 0.0 s; 8.0 s of it" in "\n".join(
        explain_lines(gained, ACCOUNTS, NOW, None)
    )


@pytest.mark.parametrize("row", [HELD, PROBED, DECLINED], ids=lambda row: row.job)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_explanation_fits_the_terminal(row: TuningRow, width: int) -> None:
    for line in list(explain_lines(row, ACCOUNTS, NOW, width))[1:]:
        assert len(line) <= width


def test_declaration_is_explained_with_asked_and_given_terms() -> None:
    told = "\n".join(explain_lines(PROBED, ACCOUNTS, NOW, None))
    assert (
        "\nDeclaration\n"
        '  User 1000 declared "chat server" and asked for a budget of 20%, the objective cost '
        "(eta 0.8), the knobs gpu_power, gpu_clock.\n"
        "  Given, as limited: a budget of 5%, the objective cost (eta 0.8), the knobs gpu_power; "
        "mode apply.\n"
        f"  {DECLARED.reason}\n"
    ) in told
    assert "Declaration" not in "\n".join(explain_lines(HELD, ACCOUNTS, NOW, None))
    silent = replace(PROBED, declared=replace(DECLARED, asked=RequestedTerms()))
    assert "asked for nothing but the operator's terms." in "\n".join(
        explain_lines(silent, ACCOUNTS, NOW, None)
    )


def test_status_line_names_the_answer_to_a_declaration() -> None:
    lines = list(status_lines(ACCOUNTS, NOW, None))
    (line,) = [line for line in lines if line.startswith(PROBED.job)]
    assert line.endswith(f'{PROBED.decision.sentence} Declared as "chat server": limited.')
    assert sum("Declared" in line for line in lines) == 1


def test_explanation_ends_with_an_operator_action_if_available() -> None:
    assert "What you can do" not in "\n".join(explain_lines(HELD, ACCOUNTS, NOW, 80))
    assert "What you can do" in "\n".join(explain_lines(DECLINED, ACCOUNTS, NOW, 80))
    assert (
        explain_facts(DECLINED, ACCOUNTS, NOW)["remedy"]
        == REASON_EXPLANATIONS[DecisionReason.NO_DEVICE].do
    )


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (cap("GPU-3"), "gpu_power: 700 W of 200 W to 700 W, default 700 W."),
        (cap("GPU-3", foreign=True), "; set by another program, and left unchanged."),
        (cap("GPU-3", usable=False, trouble="it is locked"), "; it is locked."),
        (
            cap("GPU-3", "a job", why="Because.", ceiling=600 * W, since=None, expires=None),
            "; held for a job: 560 W; the original is 700 W; because: Because; its imposed"
            " limit: 600 W.",
        ),
    ],
    ids=["nobody", "foreign", "unusable", "held"],
)
def test_cap_holder_is_shown(row: CapRow, parts: str) -> None:
    text = cap_text(row, NOW.mono)
    assert text.startswith("NVIDIA H100 SXM #3, gpu_power: ")
    assert text.endswith(parts)


def test_limit_that_is_not_obeyed_tells_both() -> None:
    row = cap("GPU-3")
    state = replace(row.state, enforced=500 * W)
    assert "; obeys 500 W" in cap_text(replace(row, state=state), NOW.mono)


# ------------------------------------------------------------------------------------ history


def test_unapplied_setting_is_in_brackets() -> None:
    (line,) = history_lines([decided(1, HELD.decision)._replace(applied=False)], None)
    assert "  (560 W)  Hold" in line


def test_long_explanation_is_wrapped_below() -> None:
    lines = list(history_lines([decided(1, HELD.decision)], 80))
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)


# ------------------------------------------------------------------------------- load tracking


def test_status_of_a_tracked_job_has_load_and_headroom() -> None:
    lines = list(status_lines(TuningAccounts("apply", (HELD, TRACKED)), NOW, None))
    (header,) = [line for line in lines if line.startswith("JOB")]
    (line,) = [line for line in lines if line.startswith(TRACKED.job)]
    assert "LOAD" in header
    assert "11.3 of 16" in line
    assert "2.8x" in line
    assert "1590 of 1980 MHz" in line
    assert TRACKED.decision.sentence in line
    (other,) = [line for line in lines if line.startswith(HELD.job)]
    assert "5%" in other
    assert not any("LOAD" in one for one in status_lines(ACCOUNTS, NOW, None))


def test_narrow_status_of_a_tracked_job_fits() -> None:
    for width, shown in ((80, True), (68, False)):
        lines = list(status_lines(TuningAccounts("apply", (TRACKED,)), NOW, width))
        assert max(map(len, lines)) <= width
        assert any("LOAD" in line for line in lines) is shown


def test_load_of_a_tracked_job_is_explained() -> None:
    text = "\n".join(explain_lines(TRACKED, TuningAccounts("apply", (TRACKED,)), NOW, None))
    assert "Load 11.3; the load bin ends at 16 requests in flight." in text
    assert "certified up to 2.8 times the present load" in text
    assert "ttft_p99: 0.5% of 1200 requests took longer than 0.4 s, of 1.0% permitted." in text
    assert "tbt_p99: no request has reported this latency yet." in text
    assert "lowered by one step a minute" in text
    assert "Not lower" not in text
    assert "Not higher" not in text
    assert TRACKED.load is not None
    original = replace(TRACKED, load=replace(TRACKED.load, headroom=None))
    assert "certified up to" not in "\n".join(load_sentences(original))
    trial = replace(TRACKED, load=replace(TRACKED.load, headroom=0.0))
    assert "not certified at any load yet" in "\n".join(load_sentences(trial))
    assert load_sentences(HELD) == []


def test_recommendation_compares_numbers_of_instances() -> None:
    lines = list(recommendation_lines(TuningAccounts("apply", (HELD, TRACKED)), 4))
    assert lines[0] == "llm/POST /chat: 4 instances of load 11.3"
    titles = "INSTANCES LOAD OF EACH SETTING LIMITS REQUESTS J/TOKEN ENERGY"
    assert " ".join(lines[1].split()) == titles
    (best,) = [line for line in lines[2:-1] if line.startswith("*")]
    assert " ".join(best.split()) == "* 2 22.6 1590 MHz kept 600 0.6 -25.0%"
    assert " ".join(lines[4].split()) == "3 to 5 9.0 to 15.1 1590 MHz kept 1200 0.8 0.0%"
    assert lines[2].split()[-5:] == ["MHz", "missed", "40", "0.5", "-37.5%"]
    assert "INSTANCES 2, ENERGY -25.0%. Nothing is changed" in lines[-1]


def test_recommendation_names_what_is_missing() -> None:
    assert list(recommendation_lines(ACCOUNTS, 1)) == [NOT_TRACKED]
    assert TRACKED.load is not None
    silent = replace(TRACKED, load=replace(TRACKED.load, bins=()))
    first, second = recommendation_lines(TuningAccounts("apply", (silent,)), 1)
    assert first == "llm/POST /chat: 1 instance of load 11.3"
    assert second.startswith("No figure yet")
    bins = [replace(one, kept=None) for one in TRACKED.load.bins]
    uncertain = replace(TRACKED, load=replace(TRACKED.load, bins=tuple(bins)))
    *_, last = recommendation_lines(TuningAccounts("apply", (uncertain,)), 1)
    assert last.startswith("No recommendation")


def test_recommendation_facts_have_the_best_range() -> None:
    facts = recommendation_facts(TRACKED, 4)
    assert facts is not None
    assert facts["recommended"] == facts["ranges"][1]
    assert facts["ranges"][1] == {
        "least_instances": 2,
        "most_instances": 2,
        "bin_bound": 32.0,
        "setting": 1590.0,
        "kept": True,
        "requests": 600,
        "joules_per_token": 0.6,
        "energy_change": pytest.approx(-0.25),
    }
    assert recommendation_facts(HELD, 4) is None


@pytest.mark.parametrize("reason", TRACKING_EXPLANATIONS)
def test_every_reason_of_load_tracking_is_explained_in_sentences(reason: DecisionReason) -> None:
    explained = TRACKING_EXPLANATIONS[reason]
    for sentence in filter(None, astuple(explained)):
        assert sentence[0].isupper()
        assert sentence.endswith(".")


# ---------------------------------------------------------------------------------- pipelines


def test_status_shows_the_ranks_of_pipelines() -> None:
    lines = list(status_lines(TuningAccounts("apply", (PIPELINED, HELD)), NOW, None))
    start = lines.index(PIPELINED.job)
    assert lines[start + 1 :] == list(pipeline_lines(PIPELINED))
    assert not any("RANK" in line for line in status_lines(ACCOUNTS, NOW, None))


def test_ranks_have_clock_plan_waiting_and_saved_energy() -> None:
    assert list(pipeline_lines(PIPELINED)) == [
        "Pipeline dp-0, straggler: an iteration takes 1.16 s, 0.931 s at the original clocks, and"
        " waits for one of 1.17 s.",
        FOLLOWED,
        "  RANK  DEVICE     CLOCK      PLAN  WAITING    SAVED",
        "     0  GPU-0   1635 MHz  1635 MHz    12.1%  5.31 kJ",
        "     1  GPU-1   1980 MHz  1125 MHz    30.2%  -12.0 J",
        "",
        "Pipeline dp-1, certified: no complete iteration yet.",
        "The ranks have 1980 1485 MHz: +0.41% time per iteration, at most +0.93%.",
        "  RANK  DEVICE     CLOCK      PLAN  WAITING  SAVED",
        "     0  GPU-2   1980 MHz  1980 MHz     5.0%      -",
        "     1  GPU-3          -         -        -      -",
        "",
        "Other hosts (not used): No etcd member decides.",
        "Host host-2 (record of 1.2 s ago, pipeline dp-2 is the straggler): Its pipeline dp-2 takes"
        " 1.17 s.",
    ]


def test_only_pipeline_has_the_sentence_of_its_job() -> None:
    one = replace(PIPELINED.pipelines[1], name="", unit_time=Nanoseconds(2 * 10**9))
    first, *table = pipeline_lines(replace(PIPELINED, pipelines=(one,), partners=()))
    assert first == "The pipeline, certified: an iteration takes 2 s."
    assert table[0].split() == ["RANK", "DEVICE", "CLOCK", "PLAN", "WAITING", "SAVED"]


def test_used_host_without_a_record_has_its_name_only() -> None:
    other = JobPartner("host-3", used=True, sentence="It takes 1 s.")
    assert list(pipeline_lines(replace(PIPELINED, pipelines=(), partners=(other,)))) == [
        "Host host-3: It takes 1 s.",
    ]


def test_other_hosts_of_a_job_are_shown_without_pipelines() -> None:
    spread = replace(HELD, partners=PIPELINED.partners)
    hosts = [
        "Other hosts (not used): No etcd member decides.",
        "Host host-2 (record of 1.2 s ago, pipeline dp-2 is the straggler): "
        "Its pipeline dp-2 takes 1.17 s.",
    ]
    accounts = TuningAccounts("apply", (spread,))
    assert list(status_lines(accounts, NOW, None))[-3:] == [spread.job, *hosts]
    text = "\n".join(explain_lines(spread, accounts, NOW, None))
    assert "Hosts\n  " + "\n  ".join(hosts) in text


def test_explanation_shows_pipelines_and_no_tried_settings() -> None:
    text = "\n".join(explain_lines(PIPELINED, TuningAccounts("apply", (PIPELINED,)), NOW, None))
    assert "Pipelines\n  Pipeline dp-0, straggler" in text
    assert meaning(DecisionReason.STRAGGLER) in text
    assert "Not lower" not in text
    assert "Not higher" not in text
