"""Print the test files nearest to a change, as many as ``make check`` has time for.

Changed are new files and those that differ from HEAD; without any, those of the last commit. A test
file is nearer the fewer imports lead from it to a changed module. The tests in the folder that
mirrors that of a changed file are near too; a file without a mirror has those of the project.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TESTS = re.compile(r"tests/(unit|property|contract|field)/(.*/)?test_\w+\.py")
SECONDS, UNKNOWN = 60.0, 1.0
"""CPU time of all files, and of one without a former run."""
RUNS = {"covered": 1 / 3, "uncovered": 1.0, "unit": 1.0, "affected": 1.0}  # coverage triples times
CASE = re.compile(r'<testcase [^>]* file="([^"]+)" line="\d+" time="([\d.]+)"')
IMPORT = re.compile(r"^ *from ([\w.]+) import (\([^)]*\)|.+)|^ *import ([\w.]+)", re.MULTILINE)
PASSED_ON = re.compile(r"^from ([\w.]+) import (\w+) as \2$", re.MULTILINE)


def git(*words: str) -> set[str]:
    """The lines that a git command prints."""
    command = ["git", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - ours
    return set(done.stdout.splitlines())


def module(path: str) -> str:
    """The dotted name under which a source file is imported."""
    return re.sub(r"^(agent|exporters|tests)/|(/__init__)?\.py$", "", path).replace("/", ".")


def importers(texts: dict[str, str]) -> dict[str, set[str]]:
    """The modules that import a module, or from a package what that module defines."""
    origins = {
        f"{package}.{name}": f"{origin}.{name}"
        for package, text in texts.items()
        for origin, name in PASSED_ON.findall(text)
    }
    found: dict[str, set[str]] = defaultdict(set)
    for user, text in texts.items():
        for origin, members, whole in IMPORT.findall(PASSED_ON.sub("", text)):
            found[whole or origin].add(user)
            for member in re.findall(r"\w+", members):
                name = f"{origin}.{member}"
                while name in origins:
                    name = origins[name]
                found[name if name in texts else name.rpartition(".")[0]].add(user)
    return found


def distances(changed: set[str], users: dict[str, set[str]]) -> dict[str, int]:
    """The number of imports from each module to the nearest changed one."""
    found, last = dict.fromkeys(changed, 0), changed
    for step in range(1, len(users)):
        last = {user for one in last for user in users[one]} - found.keys()
        found |= dict.fromkeys(last, step)
    return found


def durations() -> dict[str, float]:
    """Seconds of each test file in its latest known run."""
    found: dict[str, float] = {}
    for run, factor in RUNS.items():
        if (report := Path(f"build/tests/{run}.xml")).exists():
            took: dict[str, float] = defaultdict(float)
            for file, seconds in CASE.findall(report.read_text(encoding="utf-8")):
                took[file] += factor * float(seconds)
            found |= took
    return found


def mirror(path: str) -> Path:
    """The folder of the tests of a file's package, or of those of the project."""
    inner = re.sub(r"^agent/wattspan/|^exporters/wattspan_(?=exporters/)", "", path)
    folder = Path("tests/unit", inner).parent
    has_tests = folder.is_dir() and folder != Path("tests/unit")
    return folder if has_tests else Path("tests/unit/project")


def main() -> None:
    new = git("ls-files", "--others", "--exclude-standard")
    changed = git("diff", "--name-only", "HEAD") | new or git(
        "log", "-1", "-m", "--first-parent", "--name-only", "--format="
    )
    sources = [one for one in git("ls-files") | new if one.endswith(".py") and Path(one).exists()]
    users = importers({module(one): Path(one).read_text(encoding="utf-8") for one in sources})
    far = distances({module(one) for one in changed}, users)
    mirrors = {mirror(one) for one in changed if not one.startswith("tests/")}
    took, nearest = durations(), []
    for test in filter(TESTS.fullmatch, sources):
        mirrored = Path(test).parent in mirrors
        distance = far.get(module(test), 1 if mirrored else None)
        if distance is not None:
            nearest.append((distance, not mirrored, took.get(test, UNKNOWN), test))
    spent, chosen = 0.0, []
    for distance, _, seconds, test in sorted(nearest):
        if distance == 0 or spent + seconds <= SECONDS:
            spent += seconds
            chosen.append(test)
    print(
        f"{len(chosen)} of {len(nearest)} test files that {len(changed)} changed files may affect,"
        f" the nearest ones, {spent:.0f} s of CPU time; `make unit` runs all.",
        file=sys.stderr,
    )
    print(*chosen)


if __name__ == "__main__":
    main()
