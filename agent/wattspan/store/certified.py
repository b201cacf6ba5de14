"""What was certified, on disk: a job that comes again need not be explored again."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from wattspan.model import Knob
from wattspan.tuning import Fingerprint, Remembered
from wattspan.tuning.memory import Book, from_facts, to_facts


class CertifiedBook:
    """Belongs to the tuner's thread. What cannot be read or written is done without, and said."""

    def __init__(self, path: Path, memory: Book, log: Callable[[str], None]) -> None:
        self._path, self._memory, self._log = path, memory, log
        self._said = False

    @classmethod
    def open(cls, state_dir: Path, *, emulated: bool, log: Callable[[str], None]) -> CertifiedBook:
        """The book in ``state_dir``; an emulated host's settings are no real host's."""
        path = state_dir / "tuning" / ("certified-emulated.json" if emulated else "certified.json")
        try:
            memory = from_facts(json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            memory = Book()
        except (OSError, ValueError, RecursionError) as error:
            log(f"Jobs are explored anew: {path} cannot be read ({error}). It is written afresh.")
            memory = Book()
        return cls(path, memory, log)

    def recall(self, fingerprint: Fingerprint, knob: Knob) -> Remembered | None:
        """What was certified for it; None for nothing."""
        return self._memory.recall(fingerprint, knob)

    def certified(self, fingerprint: Fingerprint, remembered: Remembered) -> None:
        """A job's setting was proved to keep its budget."""
        self._become(self._memory.certified(fingerprint, remembered))

    def failed(self, fingerprint: Fingerprint, knob: Knob) -> None:
        """It did not, later: trust it less, or no more."""
        self._become(self._memory.failed(fingerprint, knob))

    def _become(self, memory: Book) -> None:
        if memory == self._memory:
            return
        self._memory = memory
        new = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("w", encoding="utf-8") as file:
                json.dump(to_facts(memory), file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            if not self._said:
                self._said = True
                self._log(
                    f"What is certified is forgotten at the next start: {self._path} cannot be "
                    f"written ({error.strerror})."
                )
