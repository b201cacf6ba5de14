"""Size and structure of the sources, compared with the ceilings in ``structure.toml``.

``.venv/bin/python scripts/structure.py`` prints each figure beside its ceiling, and exits with 1 if
one is above it. Raising a ceiling is a commit of its own, with the reason.

A code line has a token other than a comment or docstring, be it that of a constant. A stop of a
data path is a function in another module than its caller, or a queue, thread or process hand-over;
docs/architecture.md lists them, and each function in the list must exist. Words of documentation
are those of README, CONTRIBUTING and docs/, without generated pages and decisions.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("agent/wattspan", "exporters/wattspan_exporters")
GENERATED = (
    "docs/field.md",
    "docs/reference/commands.md",
    "docs/reference/configuration.md",
    "docs/reference/dashboards.md",
    "docs/reference/engines.md",
    "docs/reference/fuzzing.md",
    "docs/reference/metrics.md",
    "docs/reference/reasons.md",
    "docs/reference/zeus.md",
)
"""The pages that `make docs` writes: their words are those of the code and the data."""
SHARED_NAMES = ("agent/wattspan/compat/", "agent/wattspan/integrations/")  # others chose the names
STRING = re.compile(r"""#[^\n]*|(\"{3}|'{3}|"|')(?:\\.|[^\\])*?\1""", re.DOTALL)
"""A comment or a string: `ast` and `tokenize` take ten times as long for all sources."""
ENDS = re.compile(r" *(#[^\n]*)?(\n|\Z)")
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
PATH = re.compile(r"^### Path: (.+)$")
STOP = re.compile(r"^\d+\. `([\w.]+):([\w.]+)`")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def scanned(text: str) -> tuple[set[int], str]:
    """The lines with code, and the text without its strings and comments."""
    lines = {
        number
        for number, line in enumerate(map(str.strip, text.split("\n")), 1)
        if line and not line.startswith("#")
    }
    code, depth, end, line = [], 0, 0, 1
    for found in STRING.finditer(text):
        between = text[end : found.start()]
        depth += sum(map(between.count, "([{")) - sum(map(between.count, ")]}"))
        line += between.count("\n")
        of_string = range(line, line + found[0].count("\n") + 1)
        code.append(between)
        end, line = found.end(), of_string[-1]
        if found[1] is None:
            continue
        before = between.rpartition("\n")[2] if "\n" in between or len(code) == 1 else found[0]
        if depth == 0 and before.strip() in {"", "r"} and ENDS.match(text, end):
            # A string as a statement documents what it is in or below.
            lines.difference_update(of_string)
        else:
            lines.update(of_string)
    return lines, "".join([*code, text[end:]])


def code_lines(path: Path) -> int:
    """Number of lines with code."""
    return len(scanned(path.read_text(encoding="utf-8"))[0])


def classes(paths: list[Path]) -> Counter[str]:
    return Counter(
        name
        for path in paths
        if not str(path.relative_to(ROOT)).startswith(SHARED_NAMES)
        for name in CLASS.findall(scanned(path.read_text(encoding="utf-8"))[1])
    )


def stops() -> dict[str, list[tuple[str, str]]]:
    """Module and function of each stop, by the path that docs/architecture.md lists."""
    found: dict[str, list[tuple[str, str]]] = {}
    path = None
    for line in (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = PATH.match(line)
            path = heading[1] if heading else None
        elif path and (stop := STOP.match(line)):
            found.setdefault(path, []).append((stop[1], stop[2]))
    return found


def exists(module: str, function: str) -> bool:
    places = [ROOT / folder / "/".join(module.split(".")[1:]) for folder in PRODUCT]
    files = [file for one in places for file in (one.with_suffix(".py"), one / "__init__.py")]
    for file in files:
        if file.exists():
            node: ast.AST | None = ast.parse(file.read_text(encoding="utf-8"))
            for name in function.split("."):
                node = _member(node, name)
            if node is not None:
                return True
    return False


def _member(node: ast.AST | None, name: str) -> ast.AST | None:
    for one in getattr(node, "body", []):
        if getattr(one, "name", None) == name:
            return one  # type: ignore[no-any-return]
    return None


def words_of_documentation() -> dict[str, int]:
    """Words by page, without the pages that are generated and the decisions."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    return {
        name: len(text.split())
        for name, text in texts.items()
        if name not in GENERATED and not name.startswith("docs/decisions/")
    }


def figures() -> Iterator[tuple[str, int]]:
    product = sources(*PRODUCT)
    texts = [path.read_text(encoding="utf-8") for path in product]
    yield "modules", len(product)
    yield "code_lines", sum(map(code_lines, product))
    yield "largest_file", max(text.count("\n") for text in texts)
    names = classes(product)
    yield "classes", names.total()
    yield "class_names_used_twice", sum(count > 1 for count in names.values())
    for path, listed in stops().items():
        yield f"stops: {path}", len(listed)
    yield "words_of_documentation", sum(words_of_documentation().values())
    others = sources("tests", "testbed", "benchmarks")
    yield "test_code_lines", sum(map(code_lines, others))


def main() -> int:
    ceilings = tomllib.loads((ROOT / "structure.toml").read_text(encoding="utf-8"))
    measured = dict(figures())
    wrong = [f"{name}: no such figure" for name in ceilings if name not in measured]
    for name, value in measured.items():
        ceiling = ceilings.get(name)
        print(f"{name:36} {value:8,} of {'none' if ceiling is None else f'{ceiling:,}'}")
        if ceiling is None:
            wrong.append(f"{name} has no ceiling in structure.toml")
        elif value > ceiling:
            wrong.append(
                f"{name} is {value:,}, above its ceiling of {ceiling:,}: remove what it replaces, "
                "or raise the ceiling in a commit of its own with the reason"
            )
    wrong += [
        f"docs/architecture.md lists {module}:{function}, which does not exist"
        for listed in stops().values()
        for module, function in listed
        if not exists(module, function)
    ]
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
