"""``zeus.utils.testing``: a monitor that replays the log file of another one, for tests."""

from __future__ import annotations

import csv
from pathlib import Path

from wattspan.compat.zeus.monitor import DeviceSynchronizer, Measurement, ZeusMonitor
from wattspan.sdk import NotMeasuredError

_FIXED_COLUMNS = 3  # begin, name and seconds of a window; then joules of each GPU


class ReplayZeusMonitor(ZeusMonitor):
    """Measures nothing: the end of each window returns the next line of ``log_file``.

    Lines are in the order of the windows' ends. ValueError for a file that is no such log.
    """

    def __init__(
        self,
        gpu_indices: list[int] | None = None,
        approx_instant_energy: bool = False,
        log_file: str | Path | None = None,
        ignore_sync_execution: bool = False,
        match_window_name: bool = True,
    ) -> None:
        if log_file is None:
            raise ValueError("log_file is missing: name the log of a ZeusMonitor.")
        self.approx_instant_energy, self.sync_with = approx_instant_energy, "torch"
        self.ignore_sync_execution = ignore_sync_execution
        self.match_window_name = match_window_name
        self._synchronizer, self._gpus = DeviceSynchronizer("torch"), None
        with Path(log_file).open(newline="", encoding="utf-8") as file:
            columns, *rows = csv.reader(file)
        found = [int(one.removeprefix("gpu").partition("_")[0]) for one in columns[_FIXED_COLUMNS:]]
        self._indices = found if gpu_indices is None else gpu_indices
        self._rows = iter(rows)
        self.ongoing_windows: list[str] = []

    @property
    def gpu_indices(self) -> list[int]:
        """The GPUs of the log, or those named instead."""
        return self._indices

    @property
    def cpu_indices(self) -> list[int]:
        """Empty: the log has no CPU packages."""
        return []

    def begin_window(self, key: str, sync_execution: bool = True, restart: bool = False) -> None:
        """Begin a window. RuntimeError if it is open, without ``restart``."""
        if key in self.ongoing_windows:
            if not restart:
                raise RuntimeError(f"Window {key!r} is open already. End it first.")
            self.ongoing_windows.remove(key)
        self.ongoing_windows.append(key)
        self._wait(sync_execution)

    def end_window(
        self, key: str, sync_execution: bool = True, cancel: bool = False
    ) -> Measurement:
        """The next line of the log; zeros, and no line is used, with ``cancel``.

        RuntimeError if no window ``key`` is open, or if the line is another one's or missing;
        NotMeasuredError for a line without an energy.
        """
        if key not in self.ongoing_windows:
            raise RuntimeError(f"Window {key!r} is not open. Begin it first.")
        self.ongoing_windows.remove(key)
        self._wait(sync_execution)
        if cancel:
            return Measurement(0.0, dict.fromkeys(self.gpu_indices, 0.0))
        if (row := next(self._rows, None)) is None:
            raise RuntimeError(f"The log has no line for window {key!r}. Record it to its end.")
        _, name, seconds, *joules = row
        if self.match_window_name and name != key:
            raise RuntimeError(f"The next line of the log is of window {name!r}, not {key!r}.")
        if len(joules) != len(self.gpu_indices):
            raise RuntimeError(f"A line of the log has {len(joules)} GPUs, not {self.gpu_indices}.")
        if "" in joules:
            raise NotMeasuredError(f"The log does not know all energies of window {key!r}.")
        energies = map(float, joules)
        return Measurement(float(seconds), dict(zip(self.gpu_indices, energies, strict=True)))

    def _wait(self, wanted: bool) -> None:
        if wanted and not self.ignore_sync_execution:
            self.synchronize()
