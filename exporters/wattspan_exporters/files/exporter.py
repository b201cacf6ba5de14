"""What in the settings would keep the exporter from opening, found without opening it.

What becomes of each snapshot: its rows go into a part, parts become files, old files go.

The exporter: a thread of its own that writes the newest snapshot now and then.
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
from wattspan.util.tabular import NO_PYARROW, has_pyarrow
from wattspan_exporters.catalogue.metric import Metric
from wattspan_exporters.catalogue.selection import select_metrics
from wattspan_exporters.files.directory import ExportDirectory, FileName, host_component
from wattspan_exporters.files.parts import PartConversionError, PartFile, finish_part, trim_part
from wattspan_exporters.files.rows import CsvEncoder, EncodedRows, JsonLinesEncoder, RowEncoder
from wattspan_exporters.files.settings import FilesSettings


def configured_metrics(settings: FilesSettings) -> Sequence[Metric]:
    """ConfigError says what cannot be of the patterns."""
    return select_metrics(settings.metrics, "exporters.files", facts=False)


def check_format(settings: FilesSettings) -> None:
    """ConfigError without what the format needs."""
    if settings.format == "parquet" and not has_pyarrow():
        raise ConfigError(f"[exporters.files] {NO_PYARROW}")


def files_faults(settings: FilesSettings) -> Iterator[str]:
    """A sentence for each error of the settings; opens nothing."""
    yield from error_sentences(lambda: check_format(settings), lambda: configured_metrics(settings))


class SnapshotWriter:
    """Belongs to one thread. Trouble with the disk costs the rows in hand, which are counted.

    ``drops`` are rows that are in no file, ``removed`` the files that made room for newer ones.
    """

    def __init__(self, settings: FilesSettings, log: Callable[[str], None]) -> None:
        self._settings = settings
        self._path = Path(settings.directory)
        self._log = log
        metrics = configured_metrics(settings)
        self._encoder: RowEncoder = (CsvEncoder if settings.format == "csv" else JsonLinesEncoder)(
            metrics
        )
        packed = ".gz" if settings.compression == "gzip" else ""
        self._suffix = f"{settings.format}{packed}"
        self._part: PartFile | None = None
        self._host = ""
        self._left_over = True  # parts may lie there that an earlier run, or we, could not finish
        self._troubles: dict[str, Failure] = {}  # by their kind; the log knows of them
        self._turns = self._failed = 0
        self._written = -1
        self.drops = 0
        self.removed = 0

    def turn(self, snapshot: Snapshot) -> None:
        """Write it, unless it is written already."""
        if snapshot.sequence == self._written:
            return
        host = host_component(snapshot.host, emulated=snapshot.emulated)
        rows = self._encoder.encode(snapshot)
        self._written = snapshot.sequence
        self._turns += 1
        try:
            self._fit(snapshot, host, rows)
            if rows.lines:
                self._write(snapshot, rows)
        except OSError as error:
            self.drops += rows.lines
            self._trouble("write", f"to {self._path}", _reason(error), _REMEDY)
        else:
            self._well("write", f"Files are written to {self._path} again")

    @property
    def health(self) -> SourceHealth:
        """How the directory is doing, as of a source that is written to. Safe from any thread."""
        troubles = tuple(self._troubles.values())
        return SourceHealth("files", not troubles, self._turns, self._failed, troubles)

    def broken(self, error: Exception) -> None:
        """A snapshot could not be written for a reason that is no disk's."""
        self._trouble(
            "write",
            f"a snapshot to {self._path}",
            f"{type(error).__name__}: {error}",
            "Report it to the authors of wattspan; the next snapshot may fare better.",
        )

    def close(self) -> None:
        """Finish what is written; nothing is open after that."""
        self._close_part()

    def _fit(self, snapshot: Snapshot, host: str, rows: EncodedRows) -> None:
        """Close the part if these rows belong into the next one."""
        part = self._part
        if part is not None:
            if part.lost:
                self.drops += part.rows
                self._log(
                    f"{self._path / part.name.part} was removed while it was written: its "
                    f"{part.rows} rows are lost. Only files that are closed may be removed."
                )
                self._let_go(part)
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
        if self._left_over:  # once a file, and only where there is room to write
            self._left_over = False
            self._finish_left_overs(part.folder)
            self._prune(part.folder)

    def _begin(self, snapshot: Snapshot) -> PartFile:
        folder = ExportDirectory(self._path)
        try:
            name = FileName(snapshot.at.wall // 1000, self._host, self._suffix)
            return PartFile(folder, name, self._encoder.header, snapshot.at.mono)
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
            self._let_go(part)

    def _let_go(self, part: PartFile) -> None:
        part.close()
        part.folder.close()
        self._part = None

    def _finish(self, folder: ExportDirectory, name: FileName, fd: int) -> None:
        """Make the part a file; if that cannot be now, it waits as it is until a later one is."""
        try:
            made = finish_part(folder, name, fd)
        except (OSError, PartConversionError) as error:
            self._left_over = True
            why = _reason(error) if isinstance(error, OSError) else str(error).rstrip(".")
            self._trouble(
                "finish",
                str(folder.path / str(name)),
                why,
                f"Its rows wait in {name.part}; it is tried again with every new file.",
            )
        else:
            if made:
                self._well("finish", f"Files are finished in {self._path} again")

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
        """The oldest go first; what waits to be finished counts, and goes like the others."""
        files = [one for one in folder.files(self._host) if not one.is_part or folder.idle(one)]
        most = self._settings.keep or len(files)
        size = sum(one.size for one in files)
        for place, oldest in enumerate(files):
            if len(files) - place <= most and size <= self._settings.keep_size:
                break
            folder.remove(oldest.entry)
            folder.remove(oldest.name.draft)
            size -= oldest.size
            self.removed += 1

    def _trouble(self, kind: str, thing: str, cause: str, remedy: str) -> None:
        """Said once, until it is well again or the cause is another. ``kind`` is the verb."""
        before = self._troubles.get(kind)
        failure = Failure("files", thing, Trouble.RETRY, cause, remedy, verb=kind)
        self._troubles = {**self._troubles, kind: failure}
        self._failed += 1
        if before is None or before.cause != cause:
            self._log(str(failure))

    def _well(self, kind: str, sentence: str) -> None:
        if kind in self._troubles:
            self._troubles = {one: it for one, it in self._troubles.items() if one != kind}
            self._log(f"{sentence}; {self.drops} rows were dropped.")


_REMEDY = (
    "Rows are dropped, and counted, until that is possible again: make room, mount it, or give the "
    "agent the right to write there."
)


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno else str(error)


GRACE_SECONDS = 20.0
"""What finishing the last file may take when the agent stops; else the next run finishes it."""


class FilesExporter:
    """Never looked at by the poller: it takes the newest snapshot when it is time, and no queue."""

    def __init__(self, settings: FilesSettings, context: ExporterContext) -> None:
        check_format(settings)
        self._settings, self._context = settings, context
        self._writer = SnapshotWriter(settings, context.log)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return "files"

    @property
    def address(self) -> None:
        return None

    @property
    def drops(self) -> int:
        """Rows that are in no file."""
        return self._writer.drops

    @property
    def removed(self) -> int:
        """Files that were removed to make room for newer ones."""
        return self._writer.removed

    @property
    def health(self) -> SourceHealth:
        """How the directory is doing, as of a source that is written to."""
        return self._writer.health

    def start(self, view: SnapshotView) -> None:
        directory = Path(self._settings.directory)
        try:
            directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise ExporterError(_sentence(directory, os.strerror(error.errno or 0))) from None
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ExporterError(_sentence(directory, "the agent may not write there"))
        self._thread = threading.Thread(
            target=self._run, args=(view,), name="wattspan-files", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """The last snapshot is written, and the file finished."""
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
            due = max(due + interval, now - now % interval)  # what was missed is not replayed
            self._stop.wait(max(0, due - now) / 1e9)
        self._attempt(lambda: self._writer.turn(view()))
        self._attempt(self._writer.close)

    def _attempt(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the next snapshot may fare better
            self._writer.broken(error)


def _sentence(directory: Path, cause: str) -> str:
    return (
        f"Cannot write files to {directory}: {cause.lower()}; give the agent a directory of its "
        "own in [exporters.files] directory (under the service, one in /var/lib/wattspan)."
    )
