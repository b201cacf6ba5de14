"""Records of a job on several hosts: their bounds, and refused ones."""

from __future__ import annotations

import msgspec
import pytest

from wattspan.fleet.job_records import (
    MAX_RECORD_BYTES,
    MAX_RUNS,
    JobRecord,
    LossRun,
    PipelineSummary,
    RefusedRecordError,
    bounded_runs,
    decode_record,
    encode_record,
)

PIPELINE = PipelineSummary(
    name="1", whole=1.05, computed=0.9, tail=0.05, noise=0.01, state="hold",
    waiting=(0.1, 0.3), clocks=(1500, 1200),
)  # fmt: skip
RECORD = JobRecord(
    session="a",
    sent=1000,
    covered=950,
    pipelines=(PIPELINE,),
    losses=(LossRun(100, 900, 0.02, 0.03),),
)


def changed(**more: object) -> bytes:
    """The record in JSON with other values."""
    return msgspec.json.encode({**msgspec.to_builtins(RECORD), **more})


def pipeline(**more: object) -> list[dict[str, object]]:
    return [{**msgspec.to_builtins(PIPELINE), **more}]


def test_record_round_trips() -> None:
    assert decode_record(encode_record(RECORD)) == RECORD


def test_unknown_field_of_a_newer_agent_is_ignored() -> None:
    assert decode_record(changed(novelty=1)) == RECORD


@pytest.mark.parametrize(
    "value",
    [
        b"", b"null", b"[]", b"\xff", b"{" * 10_000, changed(schema=2), changed(sent=-1),
        changed(sent=1.5), changed(session="x" * 201), changed(pipelines=pipeline(whole=-1.0)),
        changed(pipelines=pipeline(whole=1e300)), changed(pipelines=pipeline(noise=2.0)),
        changed(pipelines=pipeline(waiting=[0.1] * 257)), changed(losses=[[1, 2, 0.1, 1.1]]),
        changed(losses=[[1, 2, 0.1]]), changed(losses=[[1, 2, 0.1, 0.2]] * 33),
        changed(pipelines=[{}]),
    ],
)  # fmt: skip
def test_record_of_another_schema_is_refused_with_a_sentence(value: bytes) -> None:
    with pytest.raises(RefusedRecordError, match=r"^Its record has another schema: .*version\?$"):
        decode_record(value)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (changed(pipelines=pipeline() * 2), "have one name"),
        (changed(pipelines=pipeline(computed=1.2)), "shorter than its work"),
        (changed(pipelines=pipeline(computed=0.0)), "shorter than its work"),
        (changed(pipelines=pipeline(tail=1.2)), "shorter than its work"),
        (changed(losses=[[5, 5, 0.1, 0.2]]), "has no time"),
        (changed(losses=[[5, 951, 0.1, 0.2]]), "has no time"),
        (changed(covered=1001), "later than itself"),
        (changed(losses=[[5, 6, 0.3, 0.2]]), "larger than its bound"),
        (changed(losses=[[5, 6, 0.1, 0.2], [4, 6, 0.1, 0.2]]), "not in the order"),
    ],
)
def test_contradiction_in_a_record_is_refused(value: bytes, problem: str) -> None:
    with pytest.raises(RefusedRecordError, match=f"contradicts itself: .*{problem}"):
        decode_record(value)


def test_large_record_is_written_without_the_figures_of_ranks() -> None:
    wide = msgspec.structs.replace(PIPELINE, waiting=(0.1234,) * 256, clocks=(1980,) * 256)
    pipelines = tuple(msgspec.structs.replace(wide, name=str(number)) for number in range(16))
    value = encode_record(msgspec.structs.replace(RECORD, pipelines=pipelines))
    assert len(value) <= MAX_RECORD_BYTES
    read = decode_record(value)
    assert [one.name for one in read.pipelines] == [one.name for one in pipelines]
    assert not any(one.waiting or one.clocks for one in read.pipelines)


def test_too_large_record_is_neither_written_nor_read() -> None:
    names = tuple(
        msgspec.structs.replace(PIPELINE, name=f"{number}-{'ä' * 195}") for number in range(32)
    )
    large = msgspec.structs.replace(RECORD, pipelines=names, session="ä" * 200)
    with pytest.raises(RefusedRecordError, match="more than the permitted 16384"):
        encode_record(large)
    with pytest.raises(RefusedRecordError, match="more than the permitted 16384"):
        decode_record(b" " * (MAX_RECORD_BYTES + 1))


def test_many_runs_are_joined_at_their_highest_rates() -> None:
    runs = [LossRun(number, number + 1, number / 100, number / 50) for number in range(40)]
    assert bounded_runs(runs[:MAX_RUNS]) == tuple(runs[:MAX_RUNS])
    bounded = bounded_runs(reversed(runs))  # type: ignore[arg-type]
    assert len(bounded) == MAX_RUNS
    assert bounded[0] == LossRun(0, 9, 0.08, 0.16)
    assert bounded[1:] == tuple(runs[9:])
