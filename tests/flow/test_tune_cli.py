"""`wattspan tune` as a person runs it: the real program asks a real socket."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from testbed.query_server import QueryServer
from testbed.tuned import ACCOUNTS, HELD, HOLD, PROBE, PROBED, RELEASE, decided

from wattspan.api.requests import json_response
from wattspan.cli import cli
from wattspan.clock import SystemClock
from wattspan.http.messages import HttpRequest, HttpResponse
from wattspan.http.server import HttpServer
from wattspan.http.sockets import listen_unix
from wattspan.model import CapperFigures, RecordedDecision, TuningAccounts
from wattspan.storage.tuning import DecisionLog, decisions_path
from wattspan.testing import ManualClock
from wattspan.tuning.serialization import tuning_document

DECISIONS = (decided(900, PROBE), decided(700, HOLD), decided(10, RELEASE, PROBED.job))


class Remembered:
    """A history from the agent's decision log."""

    def __call__(
        self, job: str = "", limit: int = 100, since: int | None = None
    ) -> Sequence[RecordedDecision]:
        found = [one for one in DECISIONS if job in ("", one.job)]
        return [one for one in found if since is None or one.at.wall >= since][-limit:]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def agent(run_dir: Path) -> Iterator[QueryServer]:
    """An agent under which three jobs are tuned."""
    with QueryServer(run_dir, tuning=lambda: ACCOUNTS, history=Remembered()) as server:
        yield server


@pytest.fixture
def tune(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    return Tune(run_dir, monkeypatch)


class Tune:
    """Runs the command, asking the agent in one run directory only."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("WATTSPAN_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("WATTSPAN_RUN_DIR", str(run_dir))
        config = run_dir / "config.toml"
        config.write_text(f'[agent]\nstate_dir = "{run_dir}/state"\n')
        self._config = str(config)

    def __call__(self, name: str, *arguments: str) -> Result:
        words = ["tune", name, "--config", self._config, *arguments]
        return CliRunner().invoke(cli, words, prog_name="wattspan")

    def told(self, name: str, *arguments: str) -> str:
        done = self(name, *arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    def facts(self, name: str, *arguments: str) -> dict[str, list[dict[str, object]]]:
        found = json.loads(self.told(name, "--json", *arguments))
        assert isinstance(found, dict)
        return found


def line_with(text: str, output: str) -> str:
    (found,) = [line for line in output.splitlines() if text in line]
    return found


# ------------------------------------------------------------------------------------- status


@pytest.mark.usefixtures("agent")
def test_tune_status_line_has_state_and_reason(tune: Tune) -> None:
    line = line_with("trainer/train_step", tune.told("status"))
    assert line.split()[:13] == [
        *("trainer/train_step", "holding", "560", "of", "700", "W", "2.4%", "3.1%", "5%"),
        *("18.2%", "12.3", "kJ", "(9.80"),
    ]
    assert line.endswith(HOLD.sentence)


@pytest.mark.usefixtures("agent")
def test_tune_status_first_line_is_the_mode(tune: Tune) -> None:
    first = tune.told("status").splitlines()[0]
    assert first == (
        "apply: limits are written; 9 writes, 2 restores; the host's ceiling is 2400 W"
    )


@pytest.mark.parametrize(
    "word", ["trainer/train_step", "trainer", "train_step", "TRAINER/", "er/train"]
)
@pytest.mark.usefixtures("agent")
def test_job_is_selected_by_name_service_span_or_part(word: str, tune: Tune) -> None:
    assert [one["job"] for one in tune.facts("status", word)["jobs"]] == [HELD.job]


@pytest.mark.parametrize("command", ["status", "explain"])
@pytest.mark.usefixtures("agent")
def test_job_that_is_not_there_is_bad_usage_and_names_the_nearest(command: str, tune: Tune) -> None:
    done = tune(command, "trainer/trian_step")
    assert done.exit_code == 2
    assert "Did you mean 'trainer/train_step'?" in done.stderr


@pytest.mark.usefixtures("agent")
def test_json_output_is_the_agent_response(tune: Tune) -> None:
    facts = tune.facts("status")
    assert [one["job"] for one in facts["jobs"]] == [row.job for row in ACCOUNTS.rows]
    assert facts["jobs"][0]["slowdown_bound"] == HELD.slowdown_bound
    assert len(facts["caps"]) == 4


def test_unresponsive_capper_is_reported_first(tune: Tune, run_dir: Path) -> None:
    accounts = TuningAccounts("apply", capper=CapperFigures(False, "No capper answers. Start it."))
    with QueryServer(run_dir, tuning=lambda: accounts):
        told = tune.told("status").splitlines()
    assert told[1] == "! No capper answers. Start it."
    # Of a job of 8 s, `wattspan top` shows the units: they were received.
    assert told[2].startswith("No job yet: it begins once a process has sent 20 spans of one name")
    assert "in at least 10 s. `wattspan top --by span` shows those received." in told[2]


def test_capper_of_another_agent_is_reported(tune: Tune, run_dir: Path) -> None:
    accounts = TuningAccounts("apply", capper=CapperFigures(True, "", "/run/other/capper.sock"))
    with QueryServer(run_dir, tuning=lambda: accounts):
        told = tune.told("status").splitlines()
    assert told[1] == "The capper of another agent, on /run/other/capper.sock, writes the limits."


# ------------------------------------------------------------------------------------ explain


@pytest.mark.usefixtures("agent")
def test_explain_covers_one_job(tune: Tune) -> None:
    told = tune.told("explain", HELD.job)
    for title in ("Observations", "Setting", "Tried", "Ledger", "Why this setting", "Next"):
        assert f"\n{title}\n" in told
    assert "520 W was 6.2% slower (95% bound 7.7%), more than the budget of 5%." in told
    assert "600 W saves 12.1% of the energy, 560 W 18.2%." in told
    assert "Lost so far: 12.1 s of 30.4 s permitted by the budget of 5%; 8.0 s of it" in told
    assert "held for trainer/train_step: 560 W" in told
    assert PROBED.job not in told


@pytest.mark.usefixtures("agent")
def test_programs_get_the_explanation_in_sentences_too(tune: Tune) -> None:
    (facts,) = tune.facts("explain", HELD.job)["jobs"]
    assert facts["decision"]["reason"] == "certified"  # type: ignore[index]
    assert str(facts["not_lower"]).startswith("Not lower: 520 W")
    assert str(facts["not_higher"]).startswith("Not higher: 600 W")
    assert str(facts["means"]).startswith("The setting keeps the budget")
    assert facts["then"]
    assert len(facts["held_by"]) == 2  # type: ignore[arg-type]


@pytest.mark.usefixtures("agent")
def test_explain_covers_every_job_by_default(tune: Tune) -> None:
    told = tune.told("explain")
    assert all(f"\n{row.job}, gpu_power: " in told for row in ACCOUNTS.rows)


# ------------------------------------------------------------------------------------ history


@pytest.mark.usefixtures("agent")
def test_decisions_are_listed_newest_last(tune: Tune) -> None:
    lines = tune.told("history").splitlines()
    assert [line.split()[4:6] for line in lines] == [
        ["probe", "certifying"],
        ["hold", "certified"],
        ["release", "over_budget"],
    ]
    assert lines[1].endswith(f"560 W  {HOLD.sentence}")


@pytest.mark.usefixtures("agent")
def test_history_is_filtered_by_a_part_of_the_job_name(tune: Tune) -> None:
    facts = tune.facts("history", "trainer", "--limit", "1")
    assert [(one["job"], one["reason"]) for one in facts["decisions"]] == [(HELD.job, "certified")]


@pytest.mark.parametrize(("since", "count"), [("1h", 0), ("36500d", 3), ("2023-11-14T22:05Z", 1)])
@pytest.mark.usefixtures("agent")
def test_history_starts_at_the_given_time(since: str, count: int, tune: Tune) -> None:
    assert len(tune.facts("history", "--since", since)["decisions"]) == count


@pytest.mark.usefixtures("agent")
def test_empty_history_has_a_message(tune: Tune) -> None:
    assert tune.told("history", "--since", "1s") == "No decision in that time.\n"
    assert "about 'nobody'" in tune.told("history", "nobody")


@pytest.mark.usefixtures("agent")
def test_invalid_time_is_a_one_line_error(tune: Tune) -> None:
    done = tune("history", "--since", "yesterday")
    assert done.exit_code == 1
    assert "since=yesterday: that is no time" in done.stderr
    assert done.stderr.count("\n") == 1


def test_history_without_an_agent_is_read_from_disk(tune: Tune, run_dir: Path) -> None:
    book = DecisionLog(decisions_path(run_dir / "state"), ManualClock())
    for one in DECISIONS:
        book.add(one)
    done = tune("history", HELD.job, "--limit", "1")
    assert done.exit_code == 0
    assert done.stdout.rstrip().endswith(HOLD.sentence)
    assert len(done.stdout.splitlines()) == 1
    assert "No agent answers; these decisions are from" in done.stderr
    assert tune("history", "--since", "yesterday").exit_code == 2


def test_emulated_decisions_are_labelled(tune: Tune, run_dir: Path) -> None:
    book = DecisionLog(decisions_path(run_dir / "state", emulated=True), SystemClock())
    book.add(decided(1, HOLD))
    assert tune.told("history").startswith("EMULATED")
    assert json.loads(tune("history", "--json").stdout)["emulated"] is True


# ------------------------------------------------------------------------------ no answer, off


@pytest.mark.parametrize("command", ["status", "explain", "history"])
def test_tune_without_an_agent_is_a_one_line_error(command: str, tune: Tune) -> None:
    done = tune(command)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "No wattspan agent answers" in done.stderr
    assert "`wattspan run`" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "explain"])
def test_disabled_tuning_error_names_its_setting(command: str, tune: Tune, run_dir: Path) -> None:
    with QueryServer(run_dir):
        done = tune(command)
        as_json = tune(command, "--json")
    assert (done.exit_code, done.stdout) == (7, "")
    assert 'Set mode = "advise" in [autotune]' in done.stderr
    assert done.stderr.count("\n") == 1
    assert as_json.exit_code == 7
    assert json.loads(as_json.stdout)["mode"] == "off"


def test_agent_of_another_version_is_reported(tune: Tune, run_dir: Path) -> None:
    facts = tuning_document(ACCOUNTS)
    facts.jobs[0]["state"] = "dreaming"

    async def newer(request: HttpRequest) -> HttpResponse:
        return json_response(facts)

    server = HttpServer(SystemClock(), log=print)
    server.add_http(listen_unix(run_dir / "api.sock", what="questions"), newer)
    server.start()
    try:
        done = tune("status")
    finally:
        server.stop()
    assert done.exit_code == 1
    assert "another version" in done.stderr


@pytest.mark.usefixtures("agent")
def test_name_that_may_be_several_is_bad_usage(tune: Tune) -> None:
    done = tune("history", "h")
    assert done.exit_code == 2
    assert "llm/chat, shop/POST /checkout" in done.stderr
