"""Every command that a page for readers shows is run here, or by another test, or has a reason."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from testbed.program import ENVIRONMENT
from testbed.requirements import ROOT
from testbed.shown_commands import PageShell, is_whole, script_commands, shown_commands
from testbed.spans.agent import SpanAgent
from testbed.waiting import eventually

PAGES = [
    ROOT / "README.md",
    ROOT / "docs/index.md",
    *sorted((ROOT / "docs").glob("tutorial*.md")),
    *(page for folder in ("start", "how-to", "explanation")
      for page in sorted((ROOT / "docs" / folder).glob("*.md"))),
]  # fmt: skip

FLEET = r"docs/how-to/run-a-fleet\.md: "
TESTED = {
    r"docs/tutorial-settings\.md: ": ("flow/test_tutorial_settings.py", "tutorial-settings.md"),
    r"docs/tutorial-saving\.md: ": ("flow/test_tutorial_saving.py", "tutorial-saving.md"),
    FLEET + "(mkdir|etcd |cd |for n|export W|kill|WATTSPAN_|.*wattspan (fleet|caps|doctor|run))":
        ("flow/test_run_a_fleet.py", "run-a-fleet.md"),
    FLEET + "(sudo install|openssl|etcdctl|hosts=|leaders=|jobs=|for |export E)":
        ("flow/test_fleet_permissions.py", "run-a-fleet.md"),
    r"make demo": ("flow/test_demo.py", "demo"),
    r"kubectl kustomize": ("unit/project/test_kubernetes.py", "kustomize"),
    r"scripts/build-deb|apt (install|remove)": ("flow/test_deb_package.py", "build"),
    r"service (un)?install|bin/pip install|-m venv|ln -s|rm -r /usr/local": (
        "flow/test_service_install.py", "install"),
    r"systemctl (enable|restart|try-restart|reload|status)": (
        "flow/test_systemd_agent.py", "systemctl"),
    r"opentelemetry-instrument|OTEL_SERVICE_NAME=shop": (
        "flow/test_otel_instrumented.py", "opentelemetry-instrument"),
    r"frontier run": ("flow/test_frontier.py", "frontier"),
    r"wattspan fleet": ("flow/test_run_a_fleet.py", "fleet"),
    r"advise trainer": ("flow/test_advise.py", "advise"),
    r"tune explain trainer": ("flow/test_tune_cli.py", "explain"),
    r"grep engine_token_energy": ("flow/test_inference_energy.py", "measure-llm-requests.md"),
    r"X-Energy": ("flow/test_openai_usage.py", "X-Energy"),
    r"caps restore|socat": ("flow/test_cap_by_hand.py", "cap-by-hand.md"),
    r"make fuzz": ("flow/test_fuzz_coverage.py", "fuzz"),
    r"pip(x)? install": ("flow/test_debian_releases.py", "install"),
}  # fmt: skip
"""Commands of other tests: the file in tests/, and a word of it."""

REASONS = {
    r"make test": "the tests themselves",
    r"kubectl (?!kustomize|.* -- wattspan)|helm install": "no cluster; objects are validated",
    r"docker (?!run .* wattspan:\S+ )|cd dashboards": "no container engine",
    r"srun": "no Slurm",
    r"vllm serve": "no GPU",
    r"opentelemetry-bootstrap": "downloads what it finds",
    r"journalctl": "no journal",
}
"""Commands that no test runs, and why."""


class Command(NamedTuple):
    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


@cache
def commands() -> tuple[Command, ...]:
    found = []
    for page in PAGES:
        text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
        found += [Command(name, one) for one in script_commands(text)]
        found += [Command(name, one.command) for one in shown_commands(text)
                  if not one.command.startswith("python -c")]  # fmt: skip
    return tuple(found)


def matching(patterns: Collection[str], command: str) -> list[str]:
    return [one for one in patterns if re.search(one, command)]


def here() -> list[Command]:
    others = [*TESTED, *REASONS]
    return [one for one in commands() if not matching(others, str(one))]


def test_command_ends_where_a_shell_would_run_it() -> None:
    assert is_whole("echo a")
    for open_ended in ("echo 'a", "for x in 1; do", "cat <<'END'\nEND of", "a \\"):
        assert not is_whole(open_ended)
    assert is_whole("cat <<'END'\na\nEND")
    assert list(
        script_commands("```sh\n# no command\n\nfor x in 1; do\n  echo\ndone\nls\n```\n")
    ) == [
        "for x in 1; do\n  echo\ndone",
        "ls",
    ]


def test_at_most_one_command_in_ten_is_not_run() -> None:
    found = {str(one) for one in commands()}
    untried = [one for one in found if matching(REASONS, one)]
    assert len(found) > 150
    assert len(untried) <= len(found) / 10, untried


@pytest.mark.parametrize("pattern", [*TESTED, *REASONS])
def test_pattern_of_commands_is_in_use(pattern: str) -> None:
    assert [one for one in commands() if re.search(pattern, str(one))]


@pytest.mark.parametrize(("file", "word"), sorted(set(TESTED.values())))
def test_test_of_other_commands_exists(file: str, word: str) -> None:
    assert word in (ROOT / "tests" / file).read_text(encoding="utf-8")


# ------------------------------------------------------------------------------- the others


CONTAINED = re.compile(r"(docker run|kubectl) .*(wattspan:\S+|-- wattspan)(?= )")
"""The words that run ``wattspan`` in a container, where it has the arguments that follow."""

FOREVER = re.compile(r"wattspan (run|top|demo)\b(?!.*--(once|json))")
EXITS = {"wattspan doctor": {0, 3}, "config check bad.toml": {2}}

TRAIN = """
import sys, time
for step in range(100):
    time.sleep(0.05)
    print(f"samples={step * 16}", flush=True)
"""
PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{stage},{kind},{clock},{base * 1980 / clock:.5f},{joules * clock / 1980:.3f}\n"
    for stage in (0, 1)
    for kind, base, joules in (("forward", 0.1, 33.0), ("backward", 0.2, 66.0))
    for clock in (1980, 1740, 1500)
)


STUDY = (
    "wattspan frontier run --power 100%,60% --repeat 2 --warm-up 1s --window 5s"
    " --unit 'stdout:samples=(\\d+)' -- python board.py 16"
)


class Stage:
    """A folder with the programs and files that pages name, and an agent on an emulated host."""

    def __init__(self, folder: Path, agent: SpanAgent) -> None:
        self.agent = agent
        self.work = folder / "work"
        self.work.mkdir()
        config = folder / "config.toml"
        config.write_text(f"""
[agent]
run_dir = "{agent.run_dir}"
state_dir = "{agent.state_dir}"
[emulation]
profile = "one-socket-h100"
""")
        (self.work / "train.py").write_text(TRAIN)
        (self.work / "board.py").write_text((ROOT / "examples/settings/train.py").read_text())
        (self.work / "profile.csv").write_text(PROFILE)
        (self.work / "wattspan.toml").write_text(config.read_text())
        (self.work / "bad.toml").write_text("[agent]\nintervall = 1\n")
        tracked = (ROOT / "docs/how-to/track-the-load-of-a-server.md").read_text(encoding="utf-8")
        (self.work / "track.toml").write_text(tracked.partition("```toml\n")[2].partition("```")[0])
        (self.work / "Makefile").write_text("all:\n\t@true\n")
        (self.work / "etc").mkdir()
        self.environ = {
            **ENVIRONMENT,
            "PYTHONPATH": str(ROOT / "agent"),
            "WATTSPAN_CONFIG": str(config),
            "WATTSPAN_RUN_DIR": str(agent.run_dir),
            "WATTSPAN_EMULATED_HOST": str(agent.host),
        }
        self.programs = folder / "bin"

    def prepare(self, shell: PageShell) -> None:
        sudo = self.programs / "sudo"
        sudo.write_text('#!/bin/sh\n[ "$1" = -u ] && shift 2\nexec "$@"\n')
        sudo.chmod(0o755)
        for name in (".venv", "install"):
            (self.work / name).mkdir()
        (self.work / ".venv/bin").symlink_to(self.programs)

    def form(self, command: Command) -> str:
        """The command as it can be run here: an own port, and an end of what has none."""
        text = CONTAINED.sub("wattspan", command.text)
        port = 0 if FOREVER.search(text) else self.agent.metrics_port
        text = text.replace(":9949", f":{port}")
        text = text.replace("/etc/wattspan", f"{self.work}/etc").replace("-g wattspan ", "")
        if FOREVER.search(text):
            own = "WATTSPAN_EXPORTERS_PROMETHEUS_LISTEN=127.0.0.1:0 WATTSPAN_SPANS_HTTP=127.0.0.1:0"
            apart = f"WATTSPAN_AGENT_RUN_DIR={self.work}/run WATTSPAN_AGENT_STATE_DIR={self.work}/s"
            alone = f"{own} {apart} " if "wattspan run" in text else ""
            return f"{alone}timeout --signal=INT 6 sh -c {text!r}"
        return text


@pytest.mark.exhaustive
def test_every_other_command_runs(tmp_path: Path) -> None:
    with SpanAgent(tmp_path / "agent", profile="one-socket-h100", store__enabled="true",
                   autotune__mode="apply") as agent:  # fmt: skip
        stage = Stage(tmp_path, agent)
        with PageShell(stage.work, stage.programs, stage.environ) as shell:
            stage.prepare(shell)
            eventually(lambda: "gpu_power" in shell.run("wattspan caps status"), "a capper", 60)
            eventually(lambda: '"idle_watts": 7' in shell.run("wattspan advise --json"), "rest", 60)
            print(shell.run(STUDY))
            failed = []
            for command in here():
                text = stage.form(command)
                shown = shell.run(f"cd {stage.work}; {text}\necho exit=$?")
                code = int(shown.rsplit("exit=", 1)[1].split()[0])
                allowed = next(
                    (codes for word, codes in EXITS.items() if word in command.text), {0}
                )
                allowed = allowed | ({124, 130} if FOREVER.search(text) else set())
                if code not in allowed:
                    failed.append(f"{command}\n{code}: {shown[-500:]}")
            assert not failed, "\n\n".join(failed)
