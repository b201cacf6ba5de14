"""A real process that keeps one CPU busy to a given degree, until its standard input ends.

It exists to have something to measure: its CPU time is real, and so, by the emulated law, its
energy is known. With ``--spans`` it also tells an agent what it does on the emulated host.
"""

from __future__ import annotations

import argparse
import os
import select
from collections.abc import Callable
from pathlib import Path

from wattspan.clock import SystemClock
from wattspan.emulation.calls import Follower, Lie, Requests, Steps, Teller, UnixTime
from wattspan.emulation.deeds import Deed
from wattspan.emulation.guest import Conversation
from wattspan.model import MILLISECOND
from wattspan.ports import WattspanError

PERIOD = 40 * MILLISECOND


def call_myself(name: str) -> None:
    """Show ``name`` where the kernel shows a command; 15 bytes is all it takes."""
    Path("/proc/self/comm").write_text(name[:15])


def work(duty: float, clock: SystemClock, look: Callable[[], object]) -> None:
    """Work ``duty`` of every period, rest the rest of it; ``look`` in between."""
    start = clock.monotonic()
    while True:
        work_until = start + round(duty * PERIOD)
        total = 0
        while clock.monotonic() < work_until:
            for i in range(500):
                total += i * i
        look()
        start += PERIOD
        rest = max(0, start - clock.monotonic()) / 1e9
        if select.select([0], [], [], rest)[0] and not os.read(0, 4096):
            return


def follower(kind: str, rank: int | None) -> Follower:
    """Who makes spans of what is finished, by what it is."""
    return Steps(rank) if kind == "steps" else Requests()


def narrator(
    service: str, follower: Follower, gpu: int | None, host: Path, agent: Path, clock: SystemClock
) -> Callable[[], None]:
    """Tells ``agent`` of what this process has finished on a board, or on none, at each call."""
    teller, unix = Teller(agent, service), UnixTime(clock.now())
    conversation: Conversation | None = None
    told = 0

    def look() -> None:
        nonlocal conversation, told
        try:
            conversation = conversation or Conversation(host)
            answer = conversation.ask(do="deeds", gpu=gpu, since=told)
        except WattspanError:
            return  # not on its board yet; or the host is about to end, and this process with it
        now, told, lie = clock.now(), answer["units"], Lie(**answer["lie"])
        unix.follow(now)
        for deed in answer["deeds"] if not lie.silent else ():
            for call in follower.see(Deed(*deed), lie):
                teller.tell(unix.of(call))
        teller.send(now.mono)

    return look


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("name")
    options.add_argument("duty", type=float, help="of one CPU, 0 to 1")
    options.add_argument("--cpu", type=int, help="the one to run on")
    options.add_argument("--spans", choices=("steps", "requests"), help="what its work consists of")
    options.add_argument("--service", help="the service of its spans; without it, its name")
    options.add_argument("--rank", type=int, help="which rank of a synchronous job it is")
    options.add_argument("--gpu", type=int, help="where that work is done; without it, on the CPU")
    options.add_argument("--host", type=Path, help="the emulated host's directory")
    options.add_argument("--agent", type=Path, help="the agent's socket for spans")
    chosen = options.parse_args()
    call_myself(chosen.name)
    if chosen.cpu is not None and chosen.cpu in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {chosen.cpu})
    clock = SystemClock()
    look: Callable[[], object] = lambda: None  # noqa: E731
    if chosen.spans is not None:
        service, spans = chosen.service or chosen.name, follower(chosen.spans, chosen.rank)
        look = narrator(service, spans, chosen.gpu, chosen.host, chosen.agent, clock)
    work(chosen.duty, clock, look)


if __name__ == "__main__":
    main()
