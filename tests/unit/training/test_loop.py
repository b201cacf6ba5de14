"""Units of work of training loops that are written by hand, and their declared job."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from testbed.program import ENVIRONMENT
from testbed.receiving import receiving
from testbed.requirements import ROOT
from testbed.training_spans import SERVICE, FakeDeclaration, RecordedTraining

from wattspan.sdk.span_processor import SpanProcessor
from wattspan.training import Loop
from wattspan.training.session import TuningRequest, is_local_rank_zero, start_session
from wattspan.training.spans import AgentSpanExporter, otlp_encoder
from wattspan.training.units import StepWork, batch_work


@pytest.fixture
def training() -> RecordedTraining:
    return RecordedTraining()


def tensor(*shape: int) -> Any:
    return SimpleNamespace(shape=shape)


class RaggedTensor:
    """One of `torch.nested`: https://github.com/pytorch/pytorch/issues/132111."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise RuntimeError("Internal error: NestedTensorImpl doesn't support sizes.")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A program that has run to its end, with the modules of the tests."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
        text=True,
    )


# ----------------------------------------------------------------------------- units of work


def test_pass_of_loop_is_one_unit_with_its_samples(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for _ in range(2):
            assert list(loop([tensor(4, 3), tensor(2, 3)])) == [tensor(4, 3), tensor(2, 3)]
    assert training.steps == [1, 2, 3, 4]
    assert training.work == [4, 2, 4, 2]
    assert set(training.values("train_step", "wattspan.work_unit")) == {"samples"}
    assert (training.epochs, training.parts) == ([1, 2], 0)


def test_units_lie_in_their_epoch_without_overlap(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for _ in range(2):
            for _ in loop([[1, 2]] * 3):
                pass
    epochs, steps = training.spans("epoch"), training.spans("train_step")
    for number, epoch in enumerate(epochs):
        inside = steps[3 * number : 3 * number + 3]
        assert {step.parent.span_id for step in inside if step.parent} == {epoch.context.span_id}
        edges = [epoch.start_time, *(t for s in inside for t in (s.start_time, s.end_time))]
        assert edges == sorted(edges)
        assert edges[-1] <= epoch.end_time
    assert epochs[0].end_time <= epochs[1].start_time


def test_fetch_of_next_batch_is_in_unit(training: RecordedTraining) -> None:
    fetched = []

    def loader() -> Iterator[int]:
        for batch in range(3):
            fetched.append((batch, len(training.spans("train_step"))))
            yield batch

    with Loop(**training.options) as loop:
        for _ in loop(loader()):
            pass
    assert fetched == [(0, 0), (1, 0), (2, 1)]  # the unit before ends after the fetch


def test_application_spans_are_inside_of_unit(training: RecordedTraining) -> None:
    tracer = training.provider.get_tracer("application")
    with Loop(**training.options) as loop:
        for _ in loop([1]):
            tracer.start_span("forward").end()
        tracer.start_span("after").end()
    (forward,), (step,) = training.spans("forward"), training.spans("train_step")
    assert forward.parent.span_id == step.context.span_id
    assert training.spans("after")[0].parent is None


def test_unit_that_ends_inside_of_an_application_span_leaves_no_trace(
    training: RecordedTraining,
) -> None:
    tracer = training.provider.get_tracer("application")
    session = start_session(TuningRequest(), **training.options)
    session.begin_epoch()
    for _ in range(2):
        session.begin_step()
        session.complete_step()
        with tracer.start_as_current_span("evaluation"):
            session.interrupt_late()
    session.end_epoch()
    assert not trace.get_current_span().get_span_context().is_valid
    (epoch,) = training.spans("epoch")
    parents = {step.parent.span_id for step in training.spans("train_step")}
    assert parents == {epoch.context.span_id}
    session.stop()


def test_accumulated_batches_are_one_unit(training: RecordedTraining) -> None:
    with Loop(accumulate=4, **training.options) as loop:
        for _ in loop([tensor(8, 3)] * 10):
            pass
    assert training.work == [32, 32, 16]  # the last step of an epoch may have fewer batches
    assert training.parts == 0


def test_step_is_one_unit_with_its_work(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for samples in (5, 7):
            with loop.step(work=samples):
                pass
    assert (training.steps, training.work, training.epochs) == ([1, 2], [5, 7], [])


def test_failed_step_is_no_unit(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        with pytest.raises(KeyError), loop.step():
            raise KeyError
        with loop.step():
            pass
    assert (training.steps, training.parts) == ([1], 1)


def test_unit_of_unknown_work_counts_as_one_step(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for _ in loop([object(), object()]):
            pass
    assert training.work == [1, 1]
    assert training.values("train_step", "wattspan.work_unit") == ["steps", "steps"]


def test_unit_of_another_kind_of_work_has_no_amount(training: RecordedTraining) -> None:
    batches = [{"input_ids": tensor(2, 10)}, tensor(4, 3), {"input_ids": tensor(2, 20)}]
    with Loop(**training.options) as loop:
        for _ in loop(batches):
            pass
    assert training.work == [20, None, 40]


def test_work_of_batch_can_be_given(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for _ in loop(["ab", "abc"], work=len):
            pass
    assert training.work == [2, 3]


def test_evaluation_in_the_loop_is_in_no_unit(training: RecordedTraining) -> None:
    tracer = training.provider.get_tracer("application")

    def accuracy() -> float:
        tracer.start_span("evaluation").end()
        return 0.5

    with Loop(**training.options) as loop:
        for _ in loop([1, 2, 3]):
            assert loop.evaluate(accuracy) == 0.5
        assert loop.evaluate(accuracy) == 0.5
    assert (training.steps, training.parts) == ([1, 2, 3], 0)
    (epoch,), evaluations = training.spans("epoch"), training.spans("evaluation")
    assert [e.parent.span_id for e in evaluations[:3]] == [epoch.context.span_id] * 3
    assert evaluations[3].parent is None


def test_evaluation_inside_of_accumulated_step_splits_it(training: RecordedTraining) -> None:
    with Loop(accumulate=2, **training.options) as loop:
        for batch in loop([tensor(8, 3)] * 4):
            if batch.shape and not training.parts:
                loop.evaluate(lambda: 1.0)
    assert (training.steps, training.work, training.parts) == ([1, 2], [8, 16], 1)


def test_unit_with_an_evaluation_inside_does_not_count(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for batch in loop([1, 2, 3]):
            if batch == 2:
                assert loop.evaluate(0.7) == 0.7
    assert (training.steps, training.parts) == ([1, 2], 1)


def test_unit_that_is_left_does_not_count(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for batch in loop([1, 2, 3]):
            if batch == 2:
                break
        for _ in loop([1]):
            pass
    assert (training.steps, training.parts, training.epochs) == ([1, 2], 1, [1, 2])


def test_epoch_that_was_left_open_does_not_end_a_later_one(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        left = loop([1, 2])
        next(left)
        epoch = loop([1, 2])
        next(epoch)
        del left  # its generator is closed
        gc.collect()
        assert list(epoch) == [2]
    assert (training.steps, training.parts, training.epochs) == ([1, 2], 1, [1, 2])


def test_resumed_loop_continues_the_numbers(training: RecordedTraining) -> None:
    with Loop(first_step=100, **training.options) as loop:
        for _ in loop([1, 2]):
            pass
    assert training.steps == [101, 102]


def test_seeded_trainings_have_different_span_ids(training: RecordedTraining) -> None:
    """Trainers seed ``random``, in all ranks alike."""
    for _ in range(2):
        random.seed(42)
        state = random.getstate()
        with Loop(**training.options) as loop:
            for _ in loop([1, 2]):
                pass
        assert random.getstate() == state  # the training's own numbers do not change
    contexts = [span.context for name in ("train_step", "epoch") for span in training.spans(name)]
    assert len({context.span_id for context in contexts}) == 6
    assert len({context.trace_id for context in contexts}) == 2


# -------------------------------------------------------------------------------- declaration


def test_job_is_declared_once_and_withdrawn(training: RecordedTraining) -> None:
    wish = {
        "max_slowdown": 0.03,
        "objective": "cost",
        "eta": 0.7,
        "knobs": ["gpu_power"],
        "first_watts": 300.0,
        "floor_watts": 250.0,
    }
    with Loop(**wish, **training.options):
        assert training.declared == [
            {
                "name": SERVICE,
                "service": SERVICE,
                "span": "train_step",
                "work": "wattspan.work",
            }
            | wish
        ]
        assert training.answer.withdrawals == 0
    assert training.answer.withdrawals == 1


def test_declaration_is_renewed_with_the_units(training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for _ in loop([1, 2, 3]):
            pass
    assert training.answer.renewals >= 3


def test_other_ranks_report_units_and_declare_nothing(training: RecordedTraining) -> None:
    with Loop(declares=False, **training.options) as loop:
        for _ in loop([1]):
            pass
        assert loop.declined is None
    assert (training.declared, training.steps) == ([], [1])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "RANK": "8"}, True),  # the first of the second host
        ({"LOCAL_RANK": "1", "RANK": "1"}, False),
        ({"SLURM_LOCALID": "3"}, False),
    ],
)
def test_first_rank_of_each_host_declares(environ: dict[str, str], expected: bool) -> None:
    assert is_local_rank_zero(environ) == expected


@pytest.mark.parametrize("decision", ["limited", "declined", "ignored"])
def test_refusal_is_kept_and_logged_once(decision: str, caplog: pytest.LogCaptureFixture) -> None:
    training = RecordedTraining(FakeDeclaration(decision, "The operator allows 5 %, not 30 %."))
    with Loop(max_slowdown=0.3, **training.options) as loop:
        for _ in loop([1, 2]):
            pass
        assert loop.declined == "The operator allows 5 %, not 30 %."
    assert caplog.messages == [
        "The agent does not tune as asked: The operator allows 5 %, not 30 %."
    ]


def test_refusal_after_the_first_use_of_a_gpu_is_logged(
    training: RecordedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    with Loop(**training.options) as loop:
        for batch in loop([1, 2, 3]):
            if batch == 2:
                training.answer.decision = "declined"
                training.answer.reason = "The job uses GPU 1."
        assert loop.declined == "The job uses GPU 1."
    assert caplog.messages == ["The agent does not tune as asked: The job uses GPU 1."]


def test_accepted_job_has_no_refusal(
    training: RecordedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    with Loop(**training.options) as loop:
        assert loop.declined is None
    assert caplog.messages == []


def test_missing_agent_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    training = RecordedTraining(FakeDeclaration("unavailable", "No agent answers at X."))
    with Loop(**training.options) as loop:
        for _ in loop([1, 2]):
            pass
        assert loop.declined is None
    assert caplog.messages == ["The training is not tuned: No agent answers at X."]
    assert training.steps == [1, 2]


def test_nameless_service_is_measured_and_not_declared(caplog: pytest.LogCaptureFixture) -> None:
    training = RecordedTraining(service="")
    with Loop(**training.options) as loop:
        for _ in loop([1]):
            pass
    assert (training.declared, training.steps) == ([], [1])
    (message,) = caplog.messages
    assert "no service.name. Set OTEL_SERVICE_NAME" in message


def test_error_in_the_session_does_not_fail_the_training(caplog: pytest.LogCaptureFixture) -> None:
    training = RecordedTraining(FakeDeclaration(failure="broken"))
    with Loop(**training.options) as loop:
        assert list(loop([1, 2])) == [1, 2]
    assert caplog.messages == ["Spans of the training end here: RuntimeError: broken"]
    assert training.answer.withdrawals == 1
    assert not trace.get_current_span().get_span_context().is_valid


def test_lost_session_ends_its_spans_and_withdraws(training: RecordedTraining) -> None:
    loop = Loop(**training.options)
    epoch = loop([1, 2])
    next(epoch)
    del loop, epoch
    gc.collect()
    assert (training.parts, training.epochs) == (1, [1])
    assert training.answer.withdrawals == 1


def test_fork_of_a_training_ends_nothing_of_it() -> None:
    code = """
import os
from testbed.training_spans import RecordedTraining
from wattspan.training import Loop
training = RecordedTraining()
loop = Loop(**training.options)
epoch = loop([1, 2])
next(epoch)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
loop.close()
print(training.answer.withdrawals, training.parts)
"""
    assert python(code).stdout.splitlines() == ["0 0", "1 1"]  # of the child, and of the parent


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_slowdown": -0.1}, "max_slowdown = -0.1"),
        ({"max_slowdown": float("nan")}, "max_slowdown = nan"),
        ({"eta": 1.5}, "eta = 1.5"),
        ({"eta": float("nan")}, "eta = nan"),
        ({"objective": "speed"}, "energy, cost, time"),
        ({"accumulate": 0}, "accumulate=0"),
    ],
)
def test_invalid_option_is_refused(
    options: dict[str, Any], sentence: str, training: RecordedTraining
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Loop(**options, **training.options)
    assert training.declared == []


# ------------------------------------------------------------------------------------- export


def test_spans_reach_the_agent_on_its_socket(tmp_path: Path, training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for _ in loop([1, 2]):
            pass
    exporter = AgentSpanExporter(otlp_encoder(), lambda: (str(tmp_path / "absent"), str(tmp_path)))
    with receiving(tmp_path) as agent:
        assert exporter.export(training.spans("train_step")).name == "SUCCESS"
        assert agent.sink.count == 2
    assert exporter.export(training.spans("train_step")).name == "FAILURE"


def test_spans_go_to_the_first_of_two_agents(tmp_path: Path, training: RecordedTraining) -> None:
    with Loop(**training.options) as loop:
        for _ in loop([1, 2]):
            pass
    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second):
        each.mkdir()
    exporter = AgentSpanExporter(otlp_encoder(), lambda: map(str, (first, second)))
    with receiving(second) as later:
        with receiving(first) as earlier:
            assert exporter.export(training.spans("train_step")).name == "SUCCESS"
        assert (earlier.sink.count, later.sink.count) == (2, 0)
        assert exporter.export(training.spans("train_step")).name == "SUCCESS"
        assert (earlier.sink.count, later.sink.count) == (2, 2)


def test_session_without_provider_reports_to_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    answer = RecordedTraining()
    with receiving(tmp_path) as agent:
        with Loop(service="mine", declare=answer.options["declare"]) as loop:
            for _ in loop([1, 2, 3]):
                pass
        assert agent.sink.count == 4  # all is sent at the end, the epoch too
    assert answer.declared[0]["service"] == "mine"


def test_second_loop_of_a_service_replaces_the_first(
    training: RecordedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Loop(**training.options), Loop(**training.options)
    for loop in (first, second):
        for _ in loop([1, 2]):
            pass
    assert training.steps == [1, 2]
    assert [len(training.declared), training.answer.withdrawals] == [2, 1]
    first.close()
    assert training.answer.withdrawals == 1  # the job of the second loop stays declared
    second.close()
    assert training.answer.withdrawals == 2
    (warning,) = caplog.messages
    assert "each step would count twice" in warning


def test_loops_of_two_services_are_independent(caplog: pytest.LogCaptureFixture) -> None:
    trainings = RecordedTraining(service="actor"), RecordedTraining(service="critic")
    loops = [Loop(**each.options) for each in trainings]
    for loop in loops:
        for _ in loop([1, 2]):
            pass
    assert [each.steps for each in trainings] == [[1, 2], [1, 2]]
    assert caplog.messages == []


def test_steps_reach_the_next_agent_after_a_restart(
    tmp_path: Path, training: RecordedTraining, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = AgentSpanExporter(otlp_encoder(), lambda: [str(tmp_path)])
    training.provider.add_span_processor(SimpleSpanProcessor(exporter))
    received: list[int] = []

    def train(steps: int) -> None:
        for _ in range(steps):
            with loop.step():
                pass

    with Loop(**training.options) as loop:
        for steps in (2, 3):
            with receiving(tmp_path) as agent:
                train(steps)
                received.append(agent.sink.count)
            train(1)  # between two agents
    assert received == [2, 3]
    assert training.steps == [1, 2, 3, 4, 5, 6, 7]
    assert (len(training.declared), training.answer.withdrawals) == (1, 1)
    assert training.answer.renewals >= len(training.steps)
    assert caplog.messages == []


def test_end_of_the_process_sends_what_an_open_loop_has(tmp_path: Path) -> None:
    code = f"""
import os
os.environ["WATTSPAN_RUN_DIR"] = {str(tmp_path)!r}
from wattspan.training import Loop
loop = Loop(service="trainer")
for _ in loop([1, 2]):
    pass
epoch = loop([3, 4])
next(epoch)
"""
    with receiving(tmp_path) as agent:
        python(code)
        names = [
            name
            for delivery in agent.sink.deliveries
            for part in delivery.parts
            for name in part.spans.name
        ]
    assert sorted(names) == ["epoch", "epoch", "train_step", "train_step", "train_step_part"]


def test_service_is_named_after_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTSPAN_RUN_DIR", str(tmp_path))
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    answer = RecordedTraining()
    Loop(declare=answer.options["declare"]).close()
    assert answer.declared[0]["service"] == Path(sys.argv[0]).stem
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chosen")
    Loop(declare=answer.options["declare"]).close()
    assert answer.declared[1]["service"] == "chosen"


def test_missing_encoder_of_spans_is_one_warning_with_the_extra() -> None:
    code = """
import sys
sys.modules["opentelemetry.exporter.otlp.proto.common.trace_encoder"] = None
from wattspan.training import Loop
with Loop(service="trainer") as loop:
    print(list(loop([1, 2])))
"""
    finished = python(code)
    assert finished.stdout == "[1, 2]\n"
    (line,) = finished.stderr.splitlines()
    assert "The training is not measured" in line
    assert " install opentelemetry-exporter-otlp-proto-common`" in line


def test_disabled_instrumentation_reports_nothing(
    training: RecordedTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATTSPAN_DISABLED", "1")
    with Loop(**training.options) as loop:
        assert list(loop([1, 2])) == [1, 2]
    assert (training.declared, training.steps) == ([], [])


def test_session_announces_its_spans(training: RecordedTraining) -> None:
    start_session(TuningRequest(), **training.options).stop()
    added = training.provider._active_span_processor._span_processors
    assert len([each for each in added if isinstance(each, SpanProcessor)]) == 1


def test_ended_session_leaves_no_current_span(training: RecordedTraining) -> None:
    session = start_session(TuningRequest(), **training.options)
    session.begin_epoch()
    session.begin_step()
    session.stop()
    session.begin_step()
    session.stop()
    assert not trace.get_current_span().get_span_context().is_valid
    assert (training.parts, training.answer.withdrawals) == (1, 1)


# ----------------------------------------------------------------------------- work of a batch


@pytest.mark.parametrize(
    ("batch", "work"),
    [
        ({"input_ids": tensor(4, 128), "labels": tensor(4, 128)}, StepWork(512, "tokens")),
        ({"input_ids": tensor(128)}, StepWork(128, "samples")),
        ({"pixels": tensor(16, 3, 8, 8)}, StepWork(16, "samples")),
        ((tensor(16, 3), tensor(16)), StepWork(16, "samples")),
        ([{"input_ids": tensor(4, 128)}, 3], StepWork(2, "samples")),
        (tensor(7, 2), StepWork(7, "samples")),
        (["a", "b", "c"], StepWork(3, "samples")),
        ([1.0, 2.0], StepWork(2, "samples")),
        (tensor(0, 2), None),
        (tensor(), None),
        ([], None),
        ({}, None),
        (None, None),
        ("text", None),
        (RaggedTensor(), None),
        ([RaggedTensor(), tensor(16)], None),
    ],
)
def test_work_of_batch_is_tokens_else_samples(batch: Any, work: StepWork | None) -> None:
    assert batch_work(batch) == work
