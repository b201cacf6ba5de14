"""Size and structure of the sources, compared with the ceilings in ``structure.toml``.

``.venv/bin/python scripts/structure.py`` prints each figure beside its ceiling, and exits with 1 if
one is above it. Raising a ceiling is a commit of its own, with the reason.

A code line has a token other than a comment or docstring, be it that of a constant. A stop of a
data path is a function in another module than its caller, or a queue, thread or process hand-over;
docs/architecture.md lists them, and each function in the list must exist.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("agent/wattspan", "exporters/wattspan_exporters")
SHARED_NAMES = ("agent/wattspan/compat/", "agent/wattspan/integrations/")  # others chose the names
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
PATH = re.compile(r"^### Path: (.+)$")
STOP = re.compile(r"^\d+\. `([\w.]+):([\w.]+)`")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def code_lines(text: str) -> int:
    """Number of lines with code."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        # A string as a statement documents what it is in or below.
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", 0), str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def classes(paths: list[Path]) -> Counter[str]:
    return Counter(
        node.name
        for path in paths
        if not str(path.relative_to(ROOT)).startswith(SHARED_NAMES)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
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


def figures() -> Iterator[tuple[str, int]]:
    product = sources(*PRODUCT)
    texts = [path.read_text(encoding="utf-8") for path in product]
    yield "modules", len(product)
    yield "code_lines", sum(map(code_lines, texts))
    yield "largest_file", max(text.count("\n") for text in texts)
    names = classes(product)
    yield "classes", names.total()
    yield "class_names_used_twice", sum(count > 1 for count in names.values())
    for path, listed in stops().items():
        yield f"stops: {path}", len(listed)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    yield "words_of_documentation", sum(len(p.read_text(encoding="utf-8").split()) for p in pages)
    others = sources("tests", "testbed", "benchmarks")
    yield "test_code_lines", sum(code_lines(p.read_text(encoding="utf-8")) for p in others)


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
