"""A disk that does not answer: neither full nor failing, it accepts writes and never completes
them.

File systems of their own, on loop devices, that are frozen (fsfreeze): a writer waits in the
kernel, uninterruptible, until the file system is thawed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from testbed.faults.arrivals import NONE_DROPPED, all_arrived
from testbed.faults.collector import Collector
from testbed.faults.disks import Mounted
from testbed.faults.judge import DURABLE, Breach, flowing
from testbed.faults.observation import Sight, series_of
from testbed.faults.schedule import Claim, Fault, Sign, down, unreadable
from testbed.faults.stage import Stage
from testbed.faults.targets import caught_up

from wattspan.otlp.spool import SpoolSegment

STATE, SPOOL = "state", "state/forward"

_MOUNT = """\
folder=$1; shift
for path in "$@"; do
    image=$(mktemp -p "$folder") && truncate -s 32M "$image" && mkfs.ext4 -q "$image" &&
        mkdir "$folder/$path" && mount -o loop "$image" "$folder/$path" || exit 1
done
"""


class LoopDisks(Mounted):
    """A file system for the state, and one in it for the spool. Needs loop devices."""

    def __init__(self) -> None:
        self._frozen: set[str] = set()
        super().__init__(
            _MOUNT,
            lambda folder: [str(folder), STATE, SPOOL],
            "no file system can be mounted on a loop device here",
        )

    def freeze(self, path: str) -> None:
        self._fsfreeze("--freeze", path)
        self._frozen.add(path)

    def thaw(self) -> None:
        for path in sorted(self._frozen):  # otherwise it could not be unmounted
            self._fsfreeze("--unfreeze", path)
            self._frozen.discard(path)

    def close(self) -> None:
        self.thaw()
        super().close()

    def fail(self, path: str) -> None:
        """Let a file system end in error, as after a failed write of its own: it is read-only."""
        self._mount("-o", "remount,abort", str(self.folder / path))

    def renew(self) -> None:
        """Unmount all file systems, which no process uses any more, and mount them again."""
        places = [str(self.folder / path) for path in (STATE, SPOOL)]
        images = [self._image(place) for place in places]
        for place in reversed(places):
            subprocess.run([*self.within, "umount", place], check=True)
        for image, place in zip(images, places, strict=True):
            # The file system is marked as one with errors.
            subprocess.run(["fsck.ext4", "-y", image], check=False, capture_output=True)
            self._mount("-o", "loop", image, place)

    def _image(self, place: str) -> str:
        """The file that the loop device of a mount is of."""
        find = ["findmnt", "--noheadings", "--output", "SOURCE", place]
        done = subprocess.run([*self.within, *find], check=True, capture_output=True, text=True)
        back = Path("/sys/block", done.stdout.strip().rpartition("/")[2], "loop/backing_file")
        return back.read_text().strip()

    def _mount(self, *words: str) -> None:
        subprocess.run([*self.within, "mount", *words], check=True)

    def _fsfreeze(self, how: str, path: str) -> None:
        subprocess.run([*self.within, "fsfreeze", how, self.folder / path], check=True)


class HangingStage(Stage):
    """A stage whose agent has its state and its spool on such a disk."""

    def __init__(self) -> None:
        self.disks = LoopDisks()
        self.collector = Collector()
        self.kept: set[bytes] = set()
        """The ids of spans that waited on the disk when it last began to hang."""
        try:
            super().__init__(
                within=self.disks.within,
                profile="one-socket-h100",
                settings={
                    "agent.state_dir": self.disks.folder / STATE,
                    "store.interval": "1s",
                    "store.enabled": "true",
                    "spans.forward": self.collector.url,
                    "spans.forward_spool": "true",
                },
            )
        except BaseException:
            self.collector.close()
            self.disks.close()
            raise

    @property
    def lost(self) -> set[bytes]:
        """Those of them that have not reached the collector."""
        return self.kept - self.collector.spans

    def spooled(self) -> set[bytes]:
        """The ids of the spans that are on the disk, to go on if the agent is killed now."""
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

        found = set()
        for path in self.disks.outside(SPOOL).glob("*.spans"):
            segment = SpoolSegment(path, lambda _: None)
            try:
                records = segment.recover()[0]
            except FileNotFoundError:  # the agent was done with it in this moment
                continue
            for record in records:
                body = record.read() or b""
                told = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                found |= {
                    span.span_id
                    for resource in told.resource_spans
                    for scope in resource.scope_spans
                    for span in scope.spans
                }
            segment.close()
        return found

    def close(self) -> None:
        self.disks.thaw()  # before anybody is waited for
        super().close()
        self.collector.close()
        self.disks.close()


def _of(stage: Stage) -> HangingStage:
    assert isinstance(stage, HangingStage)
    return stage


# ------------------------------------------------------------------------------------ the spool


def _hang_with_spans(stage: Stage) -> None:
    """The collector goes, some spans wait on the disk, and then that does not answer."""
    _of(stage).collector.behave("gone")
    stage.until(_of(stage).spooled, "spans on the disk", 30)
    _of(stage).kept = _of(stage).spooled()
    _of(stage).disks.freeze(SPOOL)


def _answer(stage: Stage) -> None:
    _of(stage).disks.thaw()
    _of(stage).collector.behave("takes")


def _kill_and_answer(stage: Stage) -> None:
    """A process that writes to such a disk cannot be killed: he ends when it answers."""
    stage.agent.kill()
    _answer(stage)
    stage.agent.wait(30)
    stage.begin_again()


def _mount_and_restart(stage: Stage) -> None:
    """Repair the file system, as an administrator does after such an error."""
    stage.agent.terminate()
    stage.agent.wait(30)
    _of(stage).disks.renew()
    stage.begin_again()


def _continues_earlier(breach: Breach) -> bool:
    """Totals fall to those on the disk, and rise at once by the energy since then.

    The comparison with the true energy still shows any that was invented.
    """
    return breach.what in {"fall", "spike"} and series_of(breach.series).name in DURABLE


def _joined_meanwhile() -> Sign:
    """While the spool's disk hangs, spans go on to get their energy."""
    name = "wattspan_span_energy_joules_total"
    stuck = unreadable("forward", "stuck")
    first: list[int] = []

    def seen(before: Sight, now: Sight) -> bool:
        if not stuck.seen(before, now):
            first.clear()
            return False
        first.append(now.total(name))
        return first[-1] > first[0]

    return Sign("`span_energy` rises meanwhile", seen, meanwhile=True)


def sent_anew(before: Sight, at_end: Sight, now: Sight) -> bool:
    """The next agent is healthy and has delivered the data of the previous one."""
    return (
        flowing(before, at_end, now)
        and now.total("wattspan_spans_forward_queue_bytes") == 0
        and now.total("wattspan_spans_forwarded_total") > 0
    )


def _arrived(stage: Stage) -> str:
    lost, kept = len(_of(stage).lost), len(_of(stage).kept)
    arrived = f"{lost} of them are lost" if lost else "all of them arrived"
    return f"{kept} spans were on the disk before, {arrived}"


KEPT_ARRIVED = Claim("what was on the disk arrived", lambda stage, _: not _of(stage).lost)


FAULTS = (
    Fault(
        "the disk of the state does not answer",
        lambda stage: _of(stage).disks.freeze(STATE),
        lambda stage: _of(stage).disks.thaw(),
        "Figures continue. Missing data are written to the store as soon as the disk answers;"
        " after a kill before that, the agent continues from the last written data.",
        [unreadable("store", "stuck"), down("store")],
        lasts=20.0,
        short=4.0,
    ),
    Fault(
        "the collector is away and the spool's disk does not answer",
        _hang_with_spans,
        _answer,
        "Spans get their energy and wait in memory, up to 64 MiB, until the disk answers; none is "
        "lost unless the agent ends meanwhile.",
        [unreadable("forward", "stuck"), down("forward"), _joined_meanwhile()],
        [NONE_DROPPED, all_arrived(lambda stage: _of(stage).collector), KEPT_ARRIVED],
        lasts=20.0,
        short=4.0,
        well=caught_up,
        note=_arrived,
    ),
    Fault(
        "the file system of the state becomes read-only after an error, and the agent is restarted",
        lambda stage: _of(stage).disks.fail(STATE),
        _mount_and_restart,
        "Figures continue. The next agent continues from the data that had reached the disk, so"
        " totals fall, to zero on a disk that is seconds old. Energy since then is unattributed if"
        " the counters cover it, else lost.",
        [down("store")],
        excuses=_continues_earlier,
        unanswered="it is ended and started anew",
        lasts=20.0,
        short=4.0,
        missing=100.0,
    ),
    Fault(
        "the spool's disk does not answer, and the agent is killed",
        _hang_with_spans,
        _kill_and_answer,
        "The next agent sends the spans on the disk; spans in memory are lost.",
        [unreadable("forward", "stuck"), _joined_meanwhile()],
        [KEPT_ARRIVED],
        unanswered="it is ended and started anew",
        lasts=10.0,
        short=4.0,
        well=sent_anew,
        note=_arrived,
    ),
)
