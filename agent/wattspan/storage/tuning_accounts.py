"""Slowdown accounts of running jobs on disk, so that the budget of a run survives the agent.

An account belongs to the processes of a job: a process that is still running continues it, and a
new run of the same program begins a new one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from wattspan.model import Consumer
from wattspan.tuning.decisions.budget import SlowdownAccount
from wattspan.util.files import replace_file

MAX_ACCOUNTS = 256
"""Jobs; the one that was stored longest ago is removed first."""

_MAX_BYTES = 2**20
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Amount = Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)]


class StoredAccount(msgspec.Struct, frozen=True):
    """The closed account of one job, as in the file; nanoseconds and microjoules."""

    processes: list[tuple[_Count, _Count]]
    elapsed: _Count
    units: _Count
    lost: _Amount
    bound: _Amount
    explored: _Amount
    saved: tuple[_Amount, _Amount, _Amount]

    def account(self) -> SlowdownAccount:
        """The account to continue."""
        return SlowdownAccount(
            elapsed=self.elapsed,
            units=self.units,
            closed_lost=self.lost,
            closed_bound=self.bound,
            closed_saved=self.saved,
            closed_explored=self.explored,
        )


class RunningAccounts:
    """The accounts on disk, for the thread of the tuner. Logs errors and never raises."""

    def __init__(
        self, path: Path, accounts: Mapping[str, StoredAccount], log: Callable[[str], None]
    ) -> None:
        self._path, self._accounts, self._log = path, dict(accounts), log
        self._logged = False

    @classmethod
    def open(
        cls, state_dir: Path, *, emulated: bool, log: Callable[[str], None]
    ) -> RunningAccounts:
        """Open the file in ``state_dir``; emulated hosts have their own."""
        path = state_dir / "tuning" / ("accounts-emulated.json" if emulated else "accounts.json")
        accounts: dict[str, StoredAccount] = {}
        try:
            with path.open("rb") as file:
                found = msgspec.json.decode(file.read(_MAX_BYTES))
            for job, one in msgspec.convert(found, dict[str, object]).items():
                with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
                    accounts[job] = msgspec.convert(one, StoredAccount, strict=False)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            log(
                f"Cannot read the slowdown accounts in {path} ({error}). The budget of running "
                "jobs counts from now on, and the tuner writes a new file."
            )
        return cls(path, accounts, log)

    def recall(self, job: str, processes: Collection[Consumer]) -> SlowdownAccount | None:
        """The account of a job that at least one of these processes belongs to; None without."""
        stored = self._accounts.get(job)
        if stored is None or not {*stored.processes}.intersection(map(tuple, processes)):
            return None
        return stored.account()

    def store(self, job: str, processes: Collection[Consumer], account: SlowdownAccount) -> None:
        """Store the closed account of a job with these processes."""
        self._accounts.pop(job, None)
        self._accounts[job] = StoredAccount(
            [(one.pid, one.started) for one in processes],
            account.elapsed,
            account.units,
            account.closed_lost,
            account.closed_bound,
            account.closed_explored,
            account.closed_saved,
        )
        while len(self._accounts) > MAX_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        new = self._path.with_suffix(f".{os.getpid()}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(self._accounts), new, 0o640)
        except (OSError, UnicodeEncodeError) as error:
            if not self._logged:
                self._logged = True
                self._log(
                    f"Cannot write slowdown accounts to {self._path} ({error}): after a restart of "
                    "the agent, the budget of running jobs counts from then on."
                )
