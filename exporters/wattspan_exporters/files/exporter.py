"""Writes the newest snapshot at an interval, in a thread: rows to parts, parts to files.

Old files are removed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from wattspan.model import Failure, Snapshot, SourceHealth, Trouble
from wattspan.ports import (
    ConfigError,
    ExporterContext,
    ExporterError,
    SnapshotView,
    error_sentences,
)
from wattspan.util.files import make_directory
from wattspan.util.text import NO_PYARROW, has_pyarrow
from wattspan_exporters.catalogue import select_metrics
from wattspan_exporters.catalogue.definition import Metric
from wattspan_exporters.files import FilesSettings
from wattspan_exporters.files.parts import (
    ExportDirectory,
    FileName,
    PartConversionError,
    PartFile,
    finish_part,
    host_component,
    trim_part,
)
from wattspan_exporters.files.rows import CSV, JSON_LINES, EncodedRows, RowEncoder


def configured_metrics(settings: FilesSettings) -> Sequence[Metric]:
    """The metrics of the settings; ConfigError for an invalid pattern."""
    return select_metrics(settings.metrics, "exporters.files", facts=False)


def check_format(settings: FilesSettings) -> None:
    """ConfigError if the package for the format is missing."""
    if settings.format == "parquet" and not has_pyarrow():
        raise ConfigError(f"[exporters.files] {NO_PYARROW}")


def files_faults(settings: FilesSettings) -> Iterator[str]:
    """A sentence for each error of the settings; opens nothing."""
    yield from error_sentences(lambda: check_format(settings), lambda: configured_metrics(settings))


class SnapshotWriter:
    """Writes snapshots. For one thread. An error of the disk costs the rows of a snapshot.

    ``drops`` counts lost rows.
    """

    def __init__(self, settings: FilesSettings, log: Callable[[str], None]) -> None:
        self._settings = settings
        self._path = Path(settings.directory)
        self._log = log
        self._form = CSV if settings.format == "csv" else JSON_LINES
        self._encoder = RowEncoder(configured_metrics(settings), self._form)
        packed = ".gz" if settings.compression == "gzip" else ""
        self._suffix = f"{settings.format}{packed}"
        self._part: PartFile | None = None
        self._host = ""
        self._has_left_overs = True  # unfinished parts may exist
        self._failures: dict[str, Failure] = {}  # by verb; logged
        self._turns = self._failed = 0
        self._written = -1
        self.drops = 0

    def turn(self, snapshot: Snapshot) -> None:
        """Write a snapshot, unless it is written already."""
        if snapshot.sequence == self._written:
            return
        host = host_component(snapshot.host, emulated=snapshot.emulated)
        rows = self._encoder.encode(snapshot)
        self._written = snapshot.sequence
        self._turns += 1
        try:
            self._rotate(snapshot, host, rows)
            if rows.lines:
                self._write(snapshot, rows)
        except OSError as error:
            self.drops += rows.lines
            self._fail("write", f"to {self._path}", _reason(error), _REMEDY)
        else:
            self._recover("write", f"Files are written to {self._path} again")

    @property
    def health(self) -> SourceHealth:
        """The health of the directory. Safe from any thread."""
        failures = tuple(self._failures.values())
        return SourceHealth("files", not failures, self._turns, self._failed, failures)

    def failed_unexpectedly(self, error: Exception) -> None:
        """Record an error that is not the disk's."""
        self._fail(
            "write",
            f"a snapshot to {self._path}",
            f"{type(error).__name__}: {error}",
            "Report it to the authors of wattspan; the next snapshot is tried again.",
        )

    def close(self) -> None:
        """Finish the part."""
        self._close_part()

    def _rotate(self, snapshot: Snapshot, host: str, rows: EncodedRows) -> None:
        """Close the part if these rows belong to the next one."""
        part = self._part
        if part is not None:
            if part.lost:
                self.drops += part.rows
                self._log(
                    f"{self._path / part.name.part} was removed while it was written: its "
                    f"{part.rows} rows are lost. Only files that are closed may be removed."
                )
                self._discard(part)
            elif (
                host != self._host
                or snapshot.at.mono - part.begun >= self._settings.rotate
                or (part.rows and part.size + len(rows.data) > self._settings.rotate_size)
                or part.folder.moved
            ):
                self._close_part()
        self._host = host

    def _write(self, snapshot: Snapshot, rows: EncodedRows) -> None:
        if self._part is not None:
            self._part.append(rows)
            return
        self._part = part = self._begin(snapshot)
        part.append(rows)
        if self._has_left_overs:  # once a file, after a successful write
            self._has_left_overs = False
            self._finish_left_overs(part.folder)
            self._prune(part.folder)

    def _begin(self, snapshot: Snapshot) -> PartFile:
        folder = ExportDirectory(self._path)
        try:
            name = FileName(snapshot.at.wall // 1000, self._host, self._suffix)
            return PartFile(folder, name, self._form.header, snapshot.at.mono)
        except BaseException:
            folder.close()
            raise

    def _close_part(self) -> None:
        part = self._part
        if part is None:
            return
        try:
            self._finish(part.folder, part.name, part.fd)
            with suppress(OSError):
                self._prune(part.folder)
        finally:
            self._discard(part)

    def _discard(self, part: PartFile) -> None:
        part.close()
        part.folder.close()
        self._part = None

    def _finish(self, folder: ExportDirectory, name: FileName, fd: int) -> None:
        """Make a file of the part; on failure the part waits until the next file is finished."""
        try:
            made = finish_part(folder, name, fd)
        except (OSError, PartConversionError) as error:
            self._has_left_overs = True
            why = _reason(error) if isinstance(error, OSError) else str(error).rstrip(".")
            self._fail(
                "finish",
                str(folder.path / str(name)),
                why,
                f"Its rows wait in {name.part}; every new file tries it again.",
            )
        else:
            if made:
                self._recover("finish", f"Files are finished in {self._path} again")

    def _finish_left_overs(self, folder: ExportDirectory) -> None:
        for found in folder.files(self._host):
            if found.is_part and (fd := folder.reopen(found.entry)) is not None:
                try:
                    whole = trim_part(found.name, fd)
                    self.drops += whole.torn
                    if whole.torn:
                        self._log(
                            f"The end of {self._path / found.entry} was torn: {whole.torn} of "
                            f"{whole.rows + whole.torn} rows are lost."
                        )
                    self._finish(folder, found.name, fd)
                finally:
                    os.close(fd)

    def _prune(self, folder: ExportDirectory) -> None:
        """Remove the oldest files beyond the limits; unfinished parts count as well."""
        files = [one for one in folder.files(self._host) if not one.is_part or folder.idle(one)]
        most = self._settings.keep or len(files)
        size = sum(one.size for one in files)
        for place, oldest in enumerate(files):
            if len(files) - place <= most and size <= self._settings.keep_size:
                break
            folder.remove(oldest.entry)
            folder.remove(oldest.name.draft)
            size -= oldest.size

    def _fail(self, verb: str, thing: str, cause: str, remedy: str) -> None:
        """Record a failure; logs it unless the last one has the same verb and cause."""
        before = self._failures.get(verb)
        failure = Failure("files", thing, Trouble.RETRY, cause, remedy, verb=verb)
        self._failures = {**self._failures, verb: failure}
        self._failed += 1
        if before is None or before.cause != cause:
            self._log(str(failure))

    def _recover(self, verb: str, sentence: str) -> None:
        if verb in self._failures:
            self._failures = {k: v for k, v in self._failures.items() if k != verb}
            self._log(f"{sentence}; {self.drops} rows were dropped.")


_REMEDY = (
    "Rows are dropped, and counted, until that is possible again: make room, mount it, or give the "
    "agent the right to write there."
)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else str(error)


GRACE_SECONDS = 20.0
"""Seconds to finish the last file when the agent stops; else the next run finishes it."""


class FilesExporter:
    """Writes in a thread that takes the newest snapshot at each interval; has no queue."""

    name = "files"
    address: str | None = None

    def __init__(self, settings: FilesSettings, context: ExporterContext) -> None:
        check_format(settings)
        self._settings, self._context = settings, context
        self._writer = SnapshotWriter(settings, context.log)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def drops(self) -> int:
        """Lost rows."""
        return self._writer.drops

    @property
    def health(self) -> SourceHealth:
        """The health of the directory."""
        return self._writer.health

    def start(self, view: SnapshotView) -> None:
        directory = Path(self._settings.directory)
        try:
            make_directory(directory)
        except OSError as error:
            raise ExporterError(_sentence(directory, os.strerror(error.errno or 0))) from None
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ExporterError(_sentence(directory, "the agent may not write there"))
        self._thread = threading.Thread(
            target=self._run, args=(view,), name="wattspan-files", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Write the last snapshot and finish the file."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(GRACE_SECONDS)
            self._thread = None

    def _run(self, view: SnapshotView) -> None:
        clock, interval = self._context.clock, self._settings.interval
        due = clock.monotonic()
        while not self._stop.is_set():
            self._attempt(lambda: self._writer.turn(view()))
            now = clock.monotonic()
            due = max(due + interval, now - now % interval)  # missed intervals are skipped
            self._stop.wait(max(0, due - now) / 1e9)
        self._attempt(lambda: self._writer.turn(view()))
        self._attempt(self._writer.close)

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the next snapshot is tried
            self._writer.failed_unexpectedly(error)


def _sentence(directory: Path, cause: str) -> str:
    return (
        f"Cannot write files to {directory}: {cause.lower()}; give the agent a directory of its "
        "own in [exporters.files] directory (under the service, one in /var/lib/wattspan)."
    )
