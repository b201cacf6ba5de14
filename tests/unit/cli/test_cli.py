import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from testbed.program import ENVIRONMENT

from wattspan import __version__
from wattspan.cli import COMMANDS, cli
from wattspan.cli.options import DURATION
from wattspan.ports import StoreError, WattspanError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("WATTSPAN_"):
            monkeypatch.delenv(name)


def wattspan(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, env=env, prog_name="wattspan")


def durations(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    """The options of ``command`` and its commands that take a duration, each with its path."""
    for option in command.params:
        if option.type is DURATION:
            yield *path, option.opts[-1]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            _, inner, _ = command.resolve_command(context, [name])
            assert inner is not None
            yield from durations(inner, *path, name)


@pytest.mark.parametrize("value", ["-1d", "nan", "inf", "1e3s", "106752d", ""])
def test_impossible_duration_of_any_option_is_a_usage_error(value: str) -> None:
    options = list(durations(cli))
    assert ("report", "--since") in options
    for words in options:
        result = wattspan(*words[:-1], f"{words[-1]}={value}")
        assert (result.exit_code, f"Invalid value for '{words[-1]}'" in result.stderr) == (2, True)


NETWORK = {"ssl", "http.client", "asyncio", "urllib.request", "h11"}
HEAVY = NETWORK | {
    "concurrent.futures",
    "ctypes",
    "opentelemetry",
    "prometheus_client",
    "psutil",
    "pynvml",
    "pyRAPL",
    "rich",
    "sqlite3",
    "zoneinfo",
    "wattspan.emulation.host",
    "wattspan.processes",
    "wattspan.service.agent",
    "wattspan.service.assembly",
    "wattspan.storage.database",
    "wattspan.tuning.decisions.report",
}
"""Modules that a command imports when it runs, and not for its help."""


def test_help_of_no_command_imports_a_heavy_module() -> None:
    helps = [["--help"], *([name, "--help"] for name in COMMANDS)]
    code = (
        "import os, sys; from wattspan.cli import cli\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    if not os.fork():\n"  # each help has only its own imports
        "        try: cli(words)\n"
        "        except SystemExit: pass\n"
        "        print(json.dumps([*words, *sys.modules]), file=sys.stderr)\n"
        "        sys.exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import json; {code}", json.dumps(helps)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(loaded) == len(helps)
    assert {modules[0]: HEAVY.intersection(modules) for modules in loaded} == {
        words[0]: set() for words in helps
    }


@pytest.mark.parametrize("command", ["config show", "config check"])
def test_command_that_connects_to_nothing_imports_no_network_library(command: str) -> None:
    assert modules_of(command) & {"wattspan.config", *NETWORK} == {"wattspan.config"}


def test_measure_without_an_agent_starts_its_search_without_network_library(
    tmp_path: Path,
) -> None:
    code = (
        "import sys; from wattspan.sdk.client import request_json\n"
        "try: request_json('/', {}, directories=(sys.argv[1],))\n"
        "except Exception as error: print(error)\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    )
    assert f"{tmp_path}/api.sock (no such file or directory)" in done.stdout
    assert not set(done.stderr.split()) & NETWORK


def test_agent_without_spans_and_rates_imports_no_library_for_them() -> None:
    modules = (
        "wattspan.service.assembly",
        "wattspan.ingest.listeners",
        "wattspan.service.span_joiner",
        "wattspan.api.service",
        "wattspan_exporters.prometheus.exporter",
    )
    code = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert loaded >= set(modules)
    unused = {"google.protobuf", "zoneinfo", "h2", "wattspan.recurring"}
    assert not loaded & (unused | {"wattspan.tuning.host_view", "wattspan.tuning.work_units"})


def modules_of(command: str) -> set[str]:
    """The modules that a command of the program has imported at its end."""
    code = (
        "import sys; from wattspan.cli import cli\n"
        f"try: cli({command.split()!r})\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_in_the_group_equals_the_commands_own(name: str) -> None:
    _, command, _ = cli.resolve_command(click.Context(cli), [name])
    assert command.get_short_help_str(100).startswith(COMMANDS[name].rstrip("."))


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_help(name: str) -> None:
    for flag in ("-h", "--help"):
        result = wattspan(name, flag)
        assert result.exit_code == 0
        assert f"Usage: wattspan {name}" in result.output


def test_version_option_prints_the_version() -> None:
    assert wattspan("--version").output == f"wattspan {__version__}\n"


def test_unknown_command_is_bad_usage_and_names_the_nearest() -> None:
    result = wattspan("confg")
    assert result.exit_code == 2
    assert "Did you mean 'config'?" in result.output


def test_error_is_one_sentence_on_standard_error_with_its_exit_code() -> None:
    result = wattspan("config", "check", "/nonexistent.toml")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("wattspan: Cannot read /nonexistent.toml: there is no such")
    assert result.stderr.count("\n") == 1


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(cli, "resolve_command", lambda _, args: (args[0], command, args[1:]))


def test_helper_of_counters_names_the_socket_at_which_it_cannot_listen(tmp_path: Path) -> None:
    result = wattspan("counters", "--listen", str(tmp_path / "absent/counters.sock"))
    assert result.exit_code == WattspanError.exit_code
    assert f"Cannot listen at {tmp_path}/absent/counters.sock: No such file" in result.stderr


def test_helper_of_counters_names_a_user_that_does_not_exist(tmp_path: Path) -> None:
    words = "counters", "--listen", str(tmp_path / "absent/counters.sock"), "--user"
    result = wattspan(*words, "nobody-of-this-name")
    assert result.exit_code == WattspanError.exit_code
    assert "Cannot permit user 'nobody-of-this-name' of --user" in result.stderr
    for user in ("root", "4711"):
        assert "Cannot listen" in wattspan(*words, user).stderr


def test_error_classes_have_their_own_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, StoreError("Cannot write X: full. Free some."))
    result = wattspan("run")
    assert (result.exit_code, result.stderr) == (5, "wattspan: Cannot write X: full. Free some.\n")


def test_internal_error_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyError("x"))
    result = wattspan("run")
    assert result.exit_code == 70
    assert "internal error of wattspan (KeyError: 'x')" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [["--help"], ["config", "show"]])
def test_full_output_is_named_and_no_internal_error(words: list[str]) -> None:
    program = [sys.executable, "-m", "wattspan", *words]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    remedy = "Free some room, or write to another place."
    assert done.stderr == f"wattspan: Cannot write: no space left on device. {remedy}\n"
    assert done.returncode == 1


def test_debug_option_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyError("x"))
    assert isinstance(wattspan("--debug", "run").exception, KeyError)
    assert isinstance(wattspan("run", env={"WATTSPAN_DEBUG": "1"}).exception, KeyError)


def test_interrupt_ends_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    result = wattspan("run")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


# -------------------------------------------------------------------------------------- config


def test_config_check_accepts_a_valid_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[processes]\ntop = 3\n")
    assert wattspan("config", "check", str(path)).stdout == f"{path}: ok\n"
    told = json.loads(wattspan("config", "check", str(path), "--json").stdout)
    assert told == {"ok": True, "file": str(path), "warnings": []}


def test_config_check_reads_the_named_token_files(tmp_path: Path) -> None:
    path, tokens = tmp_path / "config.toml", tmp_path / "tokens"
    path.write_text(
        f'[exporters.prometheus]\ntoken_file = "{tokens}"\n[spans]\ntoken_file = "{tokens}"\n'
    )
    missing = wattspan("config", "check", str(path))
    assert missing.exit_code == 2
    assert missing.stderr.count(f"Cannot read {tokens}: no such file or directory") == 2
    tokens.touch(mode=0o640)
    tokens.write_text("0123456789abcdef\n")
    assert wattspan("config", "check", str(path)).exit_code == 0
    off = ("--set", "spans.http=", "--set", "exporters.prometheus.listen=")
    tokens.unlink()
    assert wattspan("config", "check", str(path), *off).exit_code == 0


def test_config_check_warns_of_sensors_that_this_host_does_not_have(tmp_path: Path) -> None:
    path, chip = tmp_path / "c.toml", tmp_path / "sys/class/hwmon/hwmon0"
    chip.mkdir(parents=True)
    (chip / "name").write_text("ina260\n")
    (chip / "power1_input").write_text("5000000\n")
    settings = f'[sources.hwmon]\nsysfs = "{tmp_path / "sys"}"\n[sources.hwmon.sensors]\n'
    path.write_text(settings + '"ina260/power1" = "cpu"\n"ina26/power1" = "gpu"\n')
    told = wattspan("config", "check", str(path))
    assert told.exit_code == 0
    assert told.stderr == (
        'wattspan: warning: sources.hwmon.sensors: "ina26/power1": no sensor has this name'
        " (found: ina260/power1)\n"
    )


def test_config_check_refuses_an_endless_file() -> None:
    result = wattspan("config", "check", "/dev/zero")
    assert result.exit_code == 2
    assert "Cannot read /dev/zero: it is a device" in result.stderr


def test_config_check_lists_all_faults(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[processes]\ntop = "x"\n[sources.rapl]\nreader = "pirapl"\n')
    result = wattspan("config", "check", str(path))
    assert result.exit_code == 2
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [
        f"{path}:2",
        f"{path}:4",
    ]


def test_unknown_variable_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.touch()
    result = wattspan("config", "check", str(path), env={"WATTSPAN_AGENT_INTERVALL": "1s"})
    assert result.exit_code == 0
    assert "Did you mean WATTSPAN_AGENT_INTERVAL?" in result.stderr


def test_config_show_prints_a_file_that_check_accepts(tmp_path: Path) -> None:
    shown = wattspan("config", "show", "--set", "agent.interval=250ms").stdout
    path = tmp_path / "shown.toml"
    path.write_text(shown)
    assert 'interval = "250ms"' in shown
    assert wattspan("config", "check", str(path)).exit_code == 0
    assert wattspan("config", "show", "-c", str(path)).stdout == shown


def test_config_show_lists_origins_as_text_and_json() -> None:
    arguments = ("config", "show", "--origin", "--set", "processes.top=7")
    line = next(x for x in wattspan(*arguments).stdout.splitlines() if x.startswith("top"))
    assert line.endswith("# --set processes.top")
    facts = json.loads(wattspan(*arguments, "--json").stdout)
    assert facts["processes"]["top"] == {
        "value": 7,
        "origin": {"kind": "flag", "where": "--set processes.top"},
    }
    assert facts["agent"]["interval"]["origin"]["kind"] == "default"


def test_config_file_is_taken_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[processes]\ntop = 3\n")
    shown = wattspan("config", "show", "--json", env={"WATTSPAN_CONFIG": str(path)}).stdout
    assert json.loads(shown)["processes"]["top"] == 3


def test_assignment_without_a_value_shows_the_form() -> None:
    result = wattspan("config", "show", "--set", "agent.interval")
    assert (result.exit_code, "--set KEY=VALUE" in result.stderr) == (2, True)


# ---------------------------------------------------------------------------------- completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_calls_the_program(shell: str) -> None:
    result = wattspan("completion", shell)
    assert result.exit_code == 0
    assert f"_WATTSPAN_COMPLETE={shell}_complete" in result.stdout


@pytest.mark.parametrize(
    ("words", "completions"),
    [("wattspan con", "config"), ("wattspan config sh", "show"), ("wattspan --ve", "--version")],
)
def test_completion_lists_commands_and_options(words: str, completions: str) -> None:
    env = {
        **os.environ,
        "_WATTSPAN_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    program = [sys.executable, "-c", "from wattspan.cli import main; main()"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == f"plain,{completions}\n"
