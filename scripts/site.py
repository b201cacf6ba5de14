"""Build the documentation as a site: ``make site`` writes it to build/site/html.

The sources are staged: docs/, and whatever of the repository its pages link to, below repository/.
There Markdown stays a page, a file of text becomes a page that shows it, and a folder a page with
the names of its files. The sections of docs/index.md are the navigation. The generator is strict: a
link to a missing page or heading fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BASE = ROOT / "packaging" / "site"
INDEXES = ("index.md", "README.md")
IMAGES = (".png", ".svg")

LAYERS = {"Reference": "Reference", "Evidence": "Evidence"}
"""Sections of docs/index.md that are layers of their own; the others are guides."""

SECTION = re.compile(r"^\*\*(.+?):\*\*(.*?)(?=\n\n|\n*\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(
    r"^( *)```.*?^\1```$|(?<!\\)\]\((?![a-z]+:)(?P<target>[^)#\s]+)", re.MULTILINE | re.DOTALL
)
"""A block of code, which has no links, or the target of a link within the project."""

UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter of pages that only show files of the repository."""

CODE = re.compile(r"`[^`\n]+`")

Navigation = str | list["Navigation"] | dict[str, "Navigation"]


def navigation() -> dict[str, list[Navigation]]:
    """The pages below docs/ by layer and section, in the order of the index."""
    layers: dict[str, list[Navigation]] = {"Guides": ["index.md"]}
    for title, text in SECTION.findall((DOCS / "index.md").read_text(encoding="utf-8")):
        pages = [_entry(page) for page in re.findall(r"\]\(([\w./-]+\.md)\)", text)]
        if title in LAYERS:
            layers[LAYERS[title]] = pages
        else:
            layers["Guides"].append({title: pages})
    return layers


def _entry(page: str) -> Navigation:
    """A page; with the other pages of its folder if it is their index."""
    folder, _, name = page.rpartition("/")
    if name != "README.md":
        return page
    others = sorted(str(path.relative_to(DOCS)) for path in (DOCS / folder).glob("[!R]*.md"))
    return {folder.capitalize(): [page, *others]}


def _toml(value: Navigation) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{{ {', '.join(f'{json.dumps(k)} = {_toml(v)}' for k, v in value.items())} }}"


def configuration() -> str:
    """The configuration of the generator."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (BASE / "zensical.toml").read_text(encoding="utf-8")
    text = text.replace("@VERSION@", project["version"])
    return text + "".join(
        f"\n[[project.nav]]\n{json.dumps(layer)} = {_toml(pages)}\n"
        for layer, pages in navigation().items()
    )


def source(target: Path) -> Path:
    """The file that a link to ``target`` shows: of a folder its index, if it has one."""
    return next((target / name for name in INDEXES if (target / name).exists()), target)


def place(target: Path) -> Path:
    """Path below the pages of the site for a file or folder of the repository."""
    if target.is_relative_to(DOCS):
        within, page = target.relative_to(DOCS), True
    else:
        within, page = Path("repository", target.relative_to(ROOT)), target.suffix == ".md"
    if target.is_dir():
        return within / "index.md"
    return within if page or target.suffix in IMAGES else within.with_name(f"{within.name}.md")


def page(target: Path) -> tuple[str, list[Path]]:
    """The Markdown of ``target`` at its place, and the targets of its links."""
    name = target.relative_to(ROOT)
    if target.is_dir():
        names = sorted(path.name for path in target.iterdir() if not path.name.startswith("__"))
        return f"{UNSEARCHED}# `{name}/`\n\n" + "".join(f"- `{one}`\n" for one in names), []
    text = target.read_text(encoding="utf-8")
    if target.suffix != ".md":
        block = f"````{target.suffix[1:]}\n{text.rstrip()}\n````\n"
        return f"{UNSEARCHED}# `{name}`\n\n{block}", []
    targets: list[Path] = []

    def staged(found: re.Match[str]) -> str:
        if not found["target"]:
            return found[0]
        linked = source((target.parent / found["target"]).resolve())
        targets.append(linked)
        return f"]({os.path.relpath(place(linked), place(target).parent)}"

    # In code in a table GitHub wants a backslash before a vertical bar, and the generator shows it.
    text = re.sub(r"^\|.*$", lambda row: CODE.sub(_plain_bars, row[0]), text, flags=re.MULTILINE)
    return LINK.sub(staged, text), targets


def _plain_bars(code: re.Match[str]) -> str:
    return code[0].replace(r"\|", "|")


def stage(pages: Path) -> None:
    """Write the sources of the site to ``pages``."""
    ahead = [path for path in DOCS.rglob("*") if path.is_file()]
    while ahead:
        target = ahead.pop()
        written = pages / place(target)
        if written.exists():
            continue
        written.parent.mkdir(parents=True, exist_ok=True)
        if written.suffix == ".md":
            text, targets = page(target)
            written.write_text(text, encoding="utf-8")
            ahead += targets
        else:
            shutil.copyfile(target, written)
    shutil.copy(BASE / "site.css", pages)


def main() -> int:
    folder = Path(sys.argv[1] if sys.argv[1:] else ROOT / "build" / "site").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    stage(folder / "pages")
    (folder / "zensical.toml").write_text(configuration(), encoding="utf-8")
    generator = ROOT / ".venv-site" / "bin" / "zensical"
    command = [generator, "build", "--strict"]
    return subprocess.run(command, cwd=folder, check=False).returncode  # noqa: S603 - own tool


if __name__ == "__main__":
    sys.exit(main())
