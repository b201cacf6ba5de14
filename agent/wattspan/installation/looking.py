"""What is there now: files, links, rights. Reads, and changes nothing."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import wattspan
from wattspan.installation.marking import Content, Odd
from wattspan.installation.plan import CONFIG, STATE, Found
from wattspan.installation.program import Need, Step, Trusted
from wattspan.installation.shipped import PLACES, Shipped

_VENDOR = ("/usr/lib/systemd/system", "/lib/systemd/system")
_ADMINISTRATOR = {
    PLACES["system"]: "/etc/systemd/system",
    PLACES["sysusers.d"]: "/etc/sysusers.d",
    PLACES["tmpfiles.d"]: "/etc/tmpfiles.d",
    PLACES["udev/rules.d"]: "/etc/udev/rules.d",
}
_MASK = Odd("a link to /dev/null")
_LINKS = 40  # followed before a path is given up, as the kernel does
_LARGEST = 1 << 20


def systemctl_version() -> str:
    """What `systemctl --version` prints; "" where there is none that answers."""
    try:
        return subprocess.run(
            ["systemctl", "--version"],  # noqa: S607 - the host's own
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def look(
    root: Path, files: Sequence[Shipped], version: Callable[[], str] = systemctl_version
) -> Found:
    """What there is below ``root`` of the service; of the running host also which systemd."""
    live = root == Path("/")
    told = re.match(r"systemd (\d+)", version()) if live else None
    units = [f for f in files if f.unit]
    vendor = dict.fromkeys(f"{place}/{f.name}" for f in units for place in _VENDOR)
    above = [f"{_ADMINISTRATOR[f.folder]}/{f.name}" for f in files]
    return Found(
        files={f.path: content_in(root, f.path) for f in files},
        live=live,
        booted=live and Path("/run/systemd/system").is_dir(),
        devices=live and Path("/run/udev/control").exists(),
        packaged=tuple(p for p in vendor if os.path.lexists(below(root, p))),
        overriding=tuple(p for p in above if os.path.lexists(below(root, p))),
        masked=tuple(p for p in above if content_in(root, p) == _MASK),
        configured=below(root, CONFIG).exists(),
        state=tuple(p for p in STATE if below(root, p).is_dir() and not leads_out(root, p)),
        journal=any(below(root, STATE[1]).glob("journal-*")),
        systemd=int(told[1]) if told else None,
    )


def below(root: Path, path: str) -> Path:
    """A path of the host whose root is at ``root``."""
    return root / path.lstrip("/")


def leads_out(root: Path, path: str) -> bool:
    """Whether a link on the way to ``path`` leads out of ``root``, into this very host."""
    parent = Path(os.path.realpath(below(root, path).parent))
    return not parent.is_relative_to(os.path.realpath(root))


def content_in(root: Path, path: str) -> Content:
    """What is at ``path`` of the host whose root is at ``root``."""
    if leads_out(root, path):
        return Odd("out of this root, by a link on the way to it")
    return content(below(root, path))


def content(path: Path) -> Content:
    """What is at ``path``, links not followed."""
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return Odd(f"a link to {path.readlink()}")
        if not stat.S_ISREG(mode):
            return Odd("a directory" if stat.S_ISDIR(mode) else "no regular file")
        with path.open("rb") as file:
            return file.read(_LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return Odd(f"what cannot be read ({error.strerror})")


# ---------------------------------------------------------------------------------- the program


def own_program() -> str:
    """The path of the program that is running, as a unit would name it."""
    called = Path(sys.argv[0])
    if called.name == "wattspan" and called.is_file():
        return str(called.absolute())
    return str(Path(sys.executable).parent / "wattspan")


def needs_of(root: Path, program: str) -> tuple[Need, ...]:
    """What the program needs so that it runs: itself, its interpreter, its modules."""
    found = [_need(root, "the program", program, run=True)]
    interpreter = interpreter_of(below_links(root, program))
    if interpreter:
        found.append(_need(root, "its interpreter", interpreter, run=True))
        found += _modules(root, interpreter)
    return tuple(found)


def trusted_in(root: Path) -> Trusted:
    """Root, and for another root whoever it belongs to; and Debian's group of administrators."""
    groups = {0}
    try:
        lines = below(root, "/etc/group").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    if any(line.startswith("staff:x:50:") for line in lines):
        groups.add(50)
    owner = root.stat()
    return Trusted(frozenset({0, owner.st_uid}), frozenset(groups | {owner.st_gid}))


def below_links(root: Path, path: str) -> Path:
    """Where a path leads in ``root``, its links followed as they are seen in there."""
    steps = tuple(steps_to(root, path))
    return below(root, steps[-1].path) if steps else root


def _need(root: Path, what: str, path: str, *, run: bool = False) -> Need:
    return Need(what, path, tuple(steps_to(root, path)), run)


def steps_to(root: Path, path: str) -> Iterator[Step]:
    """Every directory and link on the way to ``path``, and what it comes to."""
    waiting = list(reversed(PurePosixPath(path).parts[1:]))
    at, links = PurePosixPath("/"), 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            at = at.parent
            continue
        here = at / part
        try:
            found = below(root, str(here)).lstat()
        except OSError:
            yield Step(str(here), None)
            return
        yield Step(str(here), found.st_mode, found.st_uid, found.st_gid)
        if not stat.S_ISLNK(found.st_mode):
            at = here
            continue
        links += 1
        if links > _LINKS:
            yield Step(str(here), None)
            return
        target = PurePosixPath(below(root, str(here)).readlink())
        if target.is_absolute():
            at = PurePosixPath("/")
        waiting += reversed([p for p in target.parts if p != "/"])


def interpreter_of(program: Path) -> str:
    """What the first line of a script names; "" for what is no script, or cannot be read."""
    try:
        with program.open("rb") as file:
            first = file.readline(500)
    except OSError:
        return ""
    words = first.removeprefix(b"#!").decode("utf-8", "replace").split()
    return words[0] if first.startswith(b"#!") and words else ""


def _modules(root: Path, interpreter: str) -> Iterator[Need]:
    """The interpreter's own modules, and wattspan's where it is the one that runs this."""
    settings = below(root, str(PurePosixPath(interpreter).parents[1])) / "pyvenv.cfg"
    try:
        lines = settings.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    pairs = {
        key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)
    }
    if home := pairs.get("home"):
        yield _need(root, "the directory of its base interpreter", home)
    if root == Path("/") and interpreter == sys.executable:
        yield _need(root, "Python's own modules", str(Path(os.__file__).parent))
        yield _need(root, "its package", str(Path(wattspan.__file__).parent))
