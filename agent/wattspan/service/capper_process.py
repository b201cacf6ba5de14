"""The capper that the agent starts itself, where none runs, and the health of any capper.

The capper follows its standard input: the pipe ends with the agent, and the capper restores every
tuned limit and ends. Limits of fixed caps and of a power budget stay in force. If the capper ends,
another one is started, which takes over or restores the remaining limits. A capper that does not
answer for the time of the service's watchdog (stopped by SIGSTOP, or hanging) is killed, so that
another one starts. If the capper of another agent serves the host, none is started before it has
not answered for that time either.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wattspan.config import without_settings
from wattspan.model import SECOND, Failure, SourceHealth, Trouble
from wattspan.ports import SUSPENDED, Caps, CapsError, Clock
from wattspan.util.process import module_command, run_again

CHECK_INTERVAL = 0.5  # seconds
FIRST_DELAY, MAX_DELAY = SECOND // 2, 60 * SECOND
STABLE_AFTER = 60 * SECOND
"""After a capper that has run so long, the next one is started at once."""
HEARTBEAT_INTERVAL = 5 * SECOND
HUNG_AFTER = 20 * SECOND
"""Without an answer for so long, a capper is killed: as WatchdogSec= of its service."""
START_TIMEOUT = 90 * SECOND
"""The time until its first answer: as TimeoutStartSec= of its service."""
STOP_TIMEOUT = 5.0  # seconds to restore the tuned limits
READY_TIMEOUT = 5 * SECOND
_READY_INTERVAL = 0.05  # seconds


@dataclass(slots=True)
class CapperProcess:
    """A part of the agent with a thread of its own.

    ``text`` is the whole configuration in TOML, ``answered`` returns True if a capper answers now.
    The capper inherits the descriptors ``kept``, and holds them until its end.
    """

    clock: Clock
    arguments: Sequence[str]
    text: str
    answered: Callable[[], bool]
    log: Callable[[str], None]
    kept: tuple[int, ...] = ()
    _process: subprocess.Popen[bytes] | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _began: int = 0
    _delay: int = FIRST_DELAY
    _ask_at: int = 0
    _kill_at: int = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start a capper unless one answers, and from then on whenever none does."""
        if self.answered():
            self._kill_at = self.clock.monotonic() + HUNG_AFTER
        else:
            self._await(self._launch())
        self._thread = threading.Thread(
            target=run_again,
            args=(lambda _: self._watch(), self._stop),
            name="wattspan-capper",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """End the capper; it restores every tuned limit first."""
        self._stop.set()
        if self._process is not None:
            # A stopped capper (SIGSTOP) restores only once it runs again.
            self._process.send_signal(signal.SIGCONT)
        if self._thread is not None:
            self._thread.join()
        process = self._process
        if process is None or process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.log(
                f"The capper (process {process.pid}) does not end; it continues to restore its "
                "limits. `wattspan caps restore` does the same once it has ended."
            )

    def _await(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the first answer, so that the first turn of the tuner finds the capper."""
        deadline = self.clock.monotonic() + READY_TIMEOUT
        while not self.answered() and process.poll() is None:
            if self.clock.monotonic() >= deadline:
                return
            self._stop.wait(_READY_INTERVAL)

    def _launch(self) -> subprocess.Popen[bytes]:
        # Anonymous memory, not a file: no other process can change the configuration.
        settings = os.memfd_create("wattspan-capper")
        try:
            os.write(settings, self.text.encode())
            self._began = self.clock.monotonic()
            self._kill_at = self._began + START_TIMEOUT
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                module_command(
                    *("wattspan", "capper", "--follow-stdin"),
                    *("--config", f"/dev/fd/{settings}", *self.arguments),
                ),
                cwd="/",
                env=without_settings(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                # Ctrl-C reaches a whole process group; only the pipe ends the capper.
                start_new_session=True,
                pass_fds=(settings, *self.kept),
            )
        finally:
            os.close(settings)
        return self._process

    def _watch(self) -> None:
        while not self._stop.wait(CHECK_INTERVAL):
            process = self._process
            if process is None:
                self._replace_missing()
                continue
            if process.poll() is None:
                self._kill_if_hung(process)
                continue
            now = self.clock.monotonic()
            if now - self._began > STABLE_AFTER:
                self._delay = FIRST_DELAY
            if now - self._began < self._delay:
                continue
            if process.stdin is not None:
                process.stdin.close()
            if self.answered():  # of another agent, which was faster
                self._process, self._kill_at = None, now + HUNG_AFTER
                continue
            self.log(
                f"The capper ended ({_exit_text(process.returncode)}); another one is started, "
                "which restores the remaining limits."
            )
            self._delay = min(2 * self._delay, MAX_DELAY)
            self._launch()

    def _replace_missing(self) -> None:
        """Start a capper if the one that another process has started is gone."""
        if self._is_silent() and not self._stop.is_set():
            self.log("The capper that served this agent does not answer; another one is started.")
            self._launch()

    def _is_silent(self) -> bool:
        """Ask at intervals; True if there was no answer until the deadline."""
        if self.clock.monotonic() < self._ask_at:
            return False
        answered = self.answered()
        now = self.clock.monotonic()
        self._ask_at = now + HEARTBEAT_INTERVAL
        if answered:
            self._kill_at = now + HUNG_AFTER
        return now >= self._kill_at

    def _kill_if_hung(self, process: subprocess.Popen[bytes]) -> None:
        silent, now = self._is_silent(), self.clock.monotonic()
        if silent and not self._stop.is_set():
            self.log(
                f"The capper (process {process.pid}) has not answered for {HUNG_AFTER // SECOND} s "
                "and is killed. If it was not stopped on purpose, a driver may hang: see "
                "`wattspan doctor`."
            )
            # A process in a kernel call ends later; the log repeats the message then.
            self._kill_at = now + HUNG_AFTER
            process.kill()


def _exit_text(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


HEALTH_INTERVAL = 5 * SECOND
CAPPER = "capper"
CAPPER_LABEL = "the capper"


@dataclass(slots=True)
class CapperHealth:
    """Asks the capper regularly while caps are wanted.

    Where systemd listens for the capper, this connection starts the capper: fixed caps and a power
    budget have no other client.
    """

    open: Callable[[], Caps]
    _asked: int = 0
    _failed: int = 0
    _error: CapsError | None = None

    def run(self, stop: threading.Event) -> None:
        """Ask at once, then every HEALTH_INTERVAL until ``stop``."""
        with contextlib.closing(self.open()) as caps:
            self.turn(caps)
            while not stop.wait(HEALTH_INTERVAL / SECOND):
                self.turn(caps)

    def turn(self, caps: Caps) -> None:
        """Ask once."""
        self._error = None
        try:
            caps.rows()
            if caps.totals.suspended:
                self._error = CapsError(SUSPENDED, "suspended")
        except CapsError as error:
            self._error = error
        self._failed += self._error is not None
        self._asked += 1

    def health(self) -> tuple[SourceHealth, ...]:
        """The last answer; nothing before the first. Safe from any thread."""
        asked, failed, error = self._asked, self._failed, self._error
        if not asked:
            return ()
        if error is None:
            return (SourceHealth(CAPPER, True, asked, failed),)
        trouble = Trouble.DENIED if error.refusal else Trouble.ABSENT
        failure = Failure(
            CAPPER, CAPPER_LABEL, trouble, f"caps are wanted. {error}".rstrip("."), verb="use"
        )
        return (SourceHealth(CAPPER, False, asked, failed, (failure,)),)
