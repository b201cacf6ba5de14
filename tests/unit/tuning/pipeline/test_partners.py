"""Records of other hosts: which of them are used, and the reasons against others."""

from __future__ import annotations

import msgspec
import pytest
from testbed.job_hosts import RunningJob
from testbed.pipelines import WATTS

from wattspan.fleet.job_records import (
    RECORD_LIFETIME,
    JobRecord,
    JobView,
    PipelineSummary,
    SeenRecord,
)
from wattspan.model import SECOND
from wattspan.tuning.pipeline.replicas import JobPartners, judged, summarized
from wattspan.tuning.pipeline.session_state import PipelinePolicy

NOW = 1000 * SECOND
OWN = PipelineSummary(name="0", whole=1.5, computed=1.0, tail=0.5, noise=0.01, state="hold")
SLOW = msgspec.structs.replace(OWN, name="1", computed=1.4, tail=0.1)


def seen(
    *pipelines: PipelineSummary, host: str = "b", age: int = 0, record: JobRecord | None = None
) -> SeenRecord:
    written = JobRecord(session="s", sent=0, pipelines=pipelines)
    return SeenRecord(host, NOW - age, record or written)


def of(*records: SeenRecord, own: tuple[PipelineSummary, ...] = (OWN,)) -> JobPartners:
    return judged(JobView(records), own, NOW)


def refusal(partners: JobPartners) -> str:
    (figures,) = partners.figures
    assert not figures.used
    assert (partners.pipelines, partners.records) == ({}, ())
    return figures.sentence


def test_fresh_record_is_used() -> None:
    partners = of(seen(SLOW))
    assert partners.pipelines == {"1 of b": SLOW}
    (figures,) = partners.figures
    assert (figures.host, figures.used, figures.straggler) == ("b", True, "")
    assert figures.sentence == (
        "Its pipeline 1 takes 1.4 s of an iteration of 1.5 s at the original clocks, with a noise"
        " of 1.0%, and holds its clocks."
    )


def test_figures_name_the_followed_pipeline_of_each_host() -> None:
    quick = msgspec.structs.replace(OWN, name="2")
    partners = of(seen(SLOW, quick), seen(OWN, host="c", age=RECORD_LIFETIME + 1), own=(OWN,))
    told = {one.host: one.straggler for one in partners.beside({"1 of b", "0 of c"})}
    assert told == {"b": "1", "c": ""}  # a record that is not used has none
    assert {one.straggler for one in partners.beside(())} == {""}


def test_figures_have_the_ages_of_the_records() -> None:
    view = JobView((seen(SLOW, age=3), SeenRecord("c", NOW - 5, None, "Other.")), trouble="None.")
    assert {one.host: one.age for one in judged(view, (OWN,), NOW).figures} == {
        "": None,
        "b": 3,
        "c": 5,
    }


def test_slowest_of_several_pipelines_is_named() -> None:
    odd = msgspec.structs.replace(OWN, name="2", state="dreams")
    partners = of(seen(odd, msgspec.structs.replace(SLOW, state="dreams")))
    assert len(partners.pipelines) == 2
    assert "The slowest of its 2 pipelines, 1, takes 1.4 s" in partners.figures[0].sentence
    assert partners.figures[0].sentence.endswith("and dreams.")


@pytest.mark.parametrize("age", [0, RECORD_LIFETIME])
def test_record_is_used_until_its_end(age: int) -> None:
    assert of(seen(SLOW, age=age)).pipelines


def test_expired_record_is_not_used() -> None:
    sentence = refusal(of(seen(SLOW, age=RECORD_LIFETIME + 1)))
    assert sentence == "Its last record came 8 s ago, and is not used any more."


def test_refused_record_has_its_sentence() -> None:
    refused = SeenRecord("b", NOW, None, "Its record has another schema.")
    assert refusal(of(refused)) == "Its record has another schema."


def test_records_are_compared_with_own_iterations_only() -> None:
    assert "this host has none" in refusal(of(seen(SLOW), own=()))
    assert "no complete iterations" in refusal(of(seen()))


@pytest.mark.parametrize("whole", [1.1, 1.9])
def test_iterations_of_another_length_are_refused(whole: float) -> None:
    another = msgspec.structs.replace(SLOW, whole=whole, computed=1.0)
    assert "are not the same iterations" in refusal(of(seen(another)))


def test_pipeline_of_this_host_is_refused() -> None:
    same = msgspec.structs.replace(SLOW, name="0")
    assert "Another host has a pipeline 0, too" in refusal(of(seen(same)))


def test_pipeline_of_two_other_hosts_is_refused() -> None:
    partners = of(seen(SLOW), seen(SLOW, host="c"))
    assert partners.pipelines == {}
    assert [one.used for one in partners.figures] == [False, False]
    # A record that is not used for another reason names nothing.
    assert len(of(seen(SLOW), seen(SLOW, host="c", age=2 * RECORD_LIFETIME)).pipelines) == 1


def test_trouble_and_turn_of_the_view_are_passed_on() -> None:
    view = JobView((), "b", may_explore=False, trouble="No etcd member decides.")
    partners = judged(view, (OWN,), NOW)
    assert (partners.explorer, partners.may_explore) == ("b", False)
    assert [(one.host, one.sentence) for one in partners.figures] == [
        ("", "No etcd member decides.")
    ]


def test_partner_finishes_no_later_than_it_is_measured_here() -> None:
    partner = msgspec.structs.replace(SLOW, computed=1.4e-6, tail=1e-7)
    assert partner.finishes(10_000, 11_500) == 11_400
    assert partner.finishes(10_000, 11_100) == 11_000  # the straggler has recovered
    assert partner.finishes(10_000, 13_000) == 11_400  # it has lower clocks


def test_summary_has_the_medians_of_the_latest_iterations() -> None:
    job = RunningJob(PipelinePolicy(1600, 800, blocking_watts=WATTS), (0.1, 0.06), (1000.0,))
    (host,) = job.hosts
    job.run(3)
    assert summarized(host.group.controls) == ()
    job.run(10)
    (summary,) = summarized(host.group.controls)
    usual = host.seconds((), 1.0)
    assert summary.computed == pytest.approx(usual)
    assert summary.whole == pytest.approx(usual + 0.05)
    assert summary.tail == pytest.approx(0.05)
    assert summary.noise == pytest.approx(0.0, abs=1e-6)
    assert (summary.name, summary.state, summary.clocks) == ("host-0", "observe", ())
    assert len(summary.waiting) == 2
