"""No command installs the name ``wattspan`` from a package index.

Nobody owns that name. Whoever registers it could run programs on the hosts of those who follow such
a command, so every page, message, script and requirement installs a checkout or a file.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from testbed.requirements import ROOT
from testbed.sources import parsed, tracked

from wattspan.util.text import pip_command

ALLOWED = {
    "tests/unit/project/test_install_commands.py": "holds the forbidden commands as examples",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
BINARY = {".png", ".gz", ".zst", ".db", ".sqlite", ".parquet", ".pb", ".bin"}

NAME = r"wattspan(?:[_-]exporters)?"
TOOLS = r"\b(?:pip[\d.]*|pipx|uv|conda|mamba|apt|apt-get|dnf|yum|brew|poetry|pdm)\b"
VERBS = r"(?:install|add|download|wheel|inject|upgrade|reinstall|run)"
# A name that is neither part of a path or address nor of another name, with extras and a version.
WORD = rf"(?<![\w./@:-]){NAME}(?:\[[^\]\n]*\])?(?:[=~<>!]=?=?\s*[\w.*{{<]\S*)?(?![\w/@-]|\.\w)"
COMMAND = re.compile(
    rf"(?:{TOOLS}[^|;&`\n]*?[\s\"',\[]{VERBS}|\b(?:uvx|easy_install))(?=[\s\"',])"
    rf"[^|;&`\n]{{0,400}}?[\s\"',\[]{WORD}"
)
EXTRA = re.compile(rf"(?<![\w./:-]){NAME}\[(?:{'|'.join([*EXTRAS, 'all', 'arrow', 'dev'])})\b")
CONTINUED = re.compile(r"\s*\\\n[\s#*/]*")
WRAPPED = re.compile(r"(?<!`)(`[^`\n]+)\n[ \t#*/>]*([^`\n]+`)(?!`)")
"""Code in a sentence that is broken over two lines."""


def forbidden(text: str) -> list[str]:
    """Commands in ``text`` that ask an index for the name, and requirements on its extras."""
    text = WRAPPED.sub(r"\1 \2", CONTINUED.sub(" ", text))
    lines = [line for line in text.splitlines() if "wattspan" in line]
    commands = [found[0] for line in lines for found in COMMAND.finditer(line)]
    return commands + EXTRA.findall("\n".join(lines))


def strings(path: Path) -> str:
    """The strings of a Python file, pieces joined; a placeholder stands for a computed part."""
    lines = []
    for node in ast.walk(parsed(path)):
        match node:
            case ast.Constant(value=str(text)):
                lines.append(text)
            case ast.JoinedStr(values=parts):
                lines.append("".join(_part(part) for part in parts))
            case ast.List(elts=words) | ast.Tuple(elts=words) | ast.Call(args=words):
                lines.append(" ".join(_part(word) for word in words))
            case _:
                pass
    return "\n".join(lines)


def _part(node: ast.AST) -> str:
    value = getattr(node, "value", "")
    return value if isinstance(value, str) else "{}"


def test_no_file_installs_the_name_from_an_index() -> None:
    found = {}
    for path in tracked():
        name = str(path.relative_to(ROOT))
        if name in ALLOWED or path.suffix in BINARY:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        commands = forbidden(text)
        if path.suffix == ".py" and "wattspan" in text and re.search(TOOLS, text):
            commands = commands or forbidden(strings(path))
        if commands:
            found[name] = commands
    assert found == {}, "install a checkout or a file: docs/how-to/install.md"


@pytest.mark.parametrize("name", ALLOWED)
def test_exception_is_still_needed(name: str) -> None:
    assert forbidden((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        "pip install wattspan",
        "sudo /usr/local/lib/wattspan/bin/pip install wattspan",
        "pip install --upgrade wattspan",
        "python3 -m pip install -U 'wattspan[arrow]'",
        "`pip install wattspan[grpc]`",
        'pip install "wattspan>=0.1"',
        "pip install wattspan==OLDER",
        "pip install opentelemetry-distro \\\n    wattspan",
        "until then: `pip install\nwattspan==0.1`",
        "pipx install wattspan",
        "pipx run wattspan doctor",
        "uvx wattspan doctor",
        "uv tool install wattspan",
        "uv pip install torch wattspan numpy",
        "uv add wattspan",
        "conda install -c conda-forge wattspan",
        "sudo apt install wattspan",
        "Install wattspan[amd] for AMD GPUs.",
        'subprocess.run(["pip", "install", "wattspan"])',
        "RUN pip install --no-cache-dir wattspan && true",
        "pip download wattspan-exporters",
    ],
)
def test_commands_that_ask_an_index_are_found(text: str) -> None:
    assert forbidden(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install .",
        "pip install /path/to/wattspan",
        "pip install ./dist/wattspan-0.1.0-py3-none-any.whl",
        'pip install "/path/to/checkout[grpc]" torch',
        "/usr/local/lib/wattspan/bin/pip install PATH",
        "`pip --python /opt/wattspan install h2`",
        "sudo apt install ./dist/wattspan_0.1.0_amd64.deb",
        "sudo apt remove wattspan",
        "pipx uninstall wattspan",
        "uv tool uninstall wattspan",
        "pip install torch\nwattspan run --emulate laptop",
        "pip install torch && wattspan run",
        "wattspan service install",
        "the device wattspan[0]",
    ],
)
def test_commands_that_install_a_file_are_permitted(text: str) -> None:
    assert forbidden(text) == []


def test_strings_in_pieces_are_joined(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        'first = "run `pip install "  f"wattspan[{extra}]`"\n'
        'second = run([pip, "install",\n "wattspan"])\n'
    )
    assert "pip install wattspan[{}]" in strings(module)
    assert forbidden(strings(module))
    assert "install wattspan" in strings(module)


def test_no_requirement_asks_for_the_project() -> None:
    """An extra that names the project would ask the index for it."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = [*PROJECT["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    listed += [one for group in groups["dependency-groups"].values() for one in group]
    for file in sorted((ROOT / "requirements").iterdir()):
        listed += file.read_text(encoding="utf-8").splitlines()
    assert [one for one in listed if re.match(rf"{NAME}\b", str(one))] == []


def test_pip_command_installs_into_the_environment_of_the_program() -> None:
    assert pip_command("h2", "a>1") == f"`pip --python {sys.prefix} install h2 'a>1'`"


def test_commands_of_messages_name_packages_of_the_extras() -> None:
    """A missing package that a message names is one that an extra brings."""
    given = set()
    for path in tracked():
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in {"agent", "exporters"}:
            given |= set(re.findall(r"pip_command\(['\"]([\w-]+)", path.read_text("utf-8")))
    brought = {re.split(r"[>=<~! ]", one)[0] for extra in EXTRAS.values() for one in extra}
    assert given <= brought
    assert {"h2", "pyarrow", "transformers", "lightning", "amdsmi"} <= given
