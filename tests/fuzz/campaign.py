"""Coverage-guided runs of the targets, each in its own process, with their results.

libFuzzer ends its process, and instrumented imports take seconds. So everything is imported once,
here, and each target is driven in a fork.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from fuzz.registry import Target

ROOT = Path(__file__).resolve().parents[2]
WATCHED = ("wattspan", "wattspan_exporters", "h11", "tomllib", "h2")
"""Packages compiled with coverage counters, which guide the fuzzer."""

SLOWEST = 60
"""Seconds of one input, which should take milliseconds: by the wall clock, on a busy machine."""

MEMORY = 1024
"""MiB of one process, beyond which an input counts as a bomb."""

_PROGRESS = re.compile(r"^#(\d+)\s.*?cov: (\d+) ft: (\d+)", re.MULTILINE)
_DONE = re.compile(r"^Done (\d+) (?:runs )?in (\d+) second", re.MULTILINE)
_PEAK = re.compile(r"^stat::peak_rss_mb:\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Result of one target: executions, edges reached, and files of failures."""

    target: Target
    executions: int
    edges: int
    features: int
    peak: int  # MiB
    seconds: float  # of CPU
    crashes: tuple[Path, ...] = ()
    said: str = field(default="", repr=False)

    @property
    def is_clean(self) -> bool:
        return not self.crashes and _DONE.search(self.said) is not None


def unavailable() -> str | None:
    """Cause that prevents coverage-guided runs here; None if possible."""
    try:
        import atheris  # noqa: F401
    except ImportError as error:
        return f"no atheris here ({error}); it has wheels for CPython on x86-64"
    return None


@contextmanager
def counted() -> Iterator[None]:
    """Modules imported inside the block are compiled with coverage counters."""
    import atheris

    with (
        redirect_stdout(StringIO()),  # atheris names each module
        redirect_stderr(StringIO()),
        atheris.instrument_imports(include=list(WATCHED)),
    ):
        yield


def drive_all(
    chosen: Iterable[Target],
    seconds: int,
    findings: Path,
    *,
    jobs: int = 1,
    seed: int = 0,
    keep: Path | None = None,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Fuzz each for so long, ``jobs`` at a time; a ``seed`` of 0 is another one each time.

    Failures are stored in ``findings``, inputs with new coverage in ``keep``.
    """
    findings.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    waiting, running = list(chosen), dict[int, tuple[Target, Path, set[Path]]]()
    with tempfile.TemporaryDirectory(prefix="fuzz-corpora-") as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                target = waiting.pop(0)
                place = Path(scratch) / target.name
                options = _options(target, seconds, findings, place, keep)
                options.insert(0, f"-seed={seed}")
                before = set(findings.glob(f"{target.name}-*"))
                running[_forked(target, options, place / "said")] = target, place, before
            pid, _, used = os.wait3(0)
            target, place, before = running.pop(pid)
            new = set(findings.glob(f"{target.name}-*")) - before
            said = (place / "said").read_text("utf-8", "replace")
            outcomes.append(_outcome(target, said, used.ru_utime + used.ru_stime, new))
            done(outcomes[-1])
    return outcomes


def _options(
    target: Target, seconds: int, findings: Path, place: Path, keep: Path | None
) -> list[str]:
    """libFuzzer's, with corpora and dictionary in ``place``."""
    seeds, grown = place / "seeds", keep / target.name if keep else place / "grown"
    for folder in (seeds, grown):
        folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (seeds / f"{number:04}").write_bytes(seed)
    escaped = ("".join(f"\\x{byte:02x}" for byte in word[:60]) for word in target.words if word)
    (place / "words").write_text("".join(f'"{word}"\n' for word in escaped))
    return [
        f"-max_total_time={seconds}",
        f"-timeout={SLOWEST}",
        f"-rss_limit_mb={MEMORY}",
        f"-max_len={target.largest}",
        *([f"-dict={place / 'words'}"] if target.words else []),  # an empty one is refused
        f"-artifact_prefix={findings}/{target.name}-",
        "-print_final_stats=1",
        str(grown),
        str(seeds),
    ]


def _forked(target: Target, options: Sequence[str], said: Path) -> int:
    """The pid of a process in which libFuzzer runs ``target``."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        import atheris

        with said.open("wb") as out:
            for number in (1, 2):
                os.dup2(out.fileno(), number)
        atheris.Setup([sys.argv[0], *options], target.run)
        atheris.Fuzz()
    except SystemExit:  # something was found: libFuzzer writes it down as the process exits
        ctypes.CDLL(None).exit(1)
    except BaseException:  # noqa: BLE001 - a fork must not go on in its parent's place
        traceback.print_exc()
    finally:
        os._exit(1)


def _outcome(target: Target, said: str, seconds: float, crashes: Iterable[Path]) -> Outcome:
    steps = _PROGRESS.findall(said)
    executions, edges, features = map(int, steps[-1]) if steps else (0, 0, 0)
    if match := _DONE.search(said):
        executions = int(match[1])
    peak = int(found[1]) if (found := _PEAK.search(said)) else 0
    return Outcome(target, executions, edges, features, peak, seconds, tuple(sorted(crashes)), said)


def why(outcome: Outcome) -> str:
    """Failures according to libFuzzer's output."""
    for line in outcome.said.splitlines():
        if re.match(r"[\w.]*(Error|Exception|Failure)\b", line.strip()):
            return line.strip()[:300]
    found = re.search(r"ERROR: libFuzzer: [^\n]*", outcome.said)
    return found[0] if found else outcome.said.strip()[-300:]


def reproducer(crash: Path, target: Target) -> str:
    """The command that shows it again."""
    return f"make fuzz target={target.name} input={crash}"
