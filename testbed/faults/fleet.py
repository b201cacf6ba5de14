"""An etcd with TLS and users that is flooded, compacted, restarted, or refuses the agent.

The agent is the only host of its fleet, so it leads: it watches every key of the fleet.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from testbed.certificates import Authority
from testbed.etcd import EtcdCluster
from testbed.faults.judge import flowing
from testbed.faults.observation import NANO, Sight
from testbed.faults.power_limits import Limits
from testbed.faults.schedule import Claim, Fault, down
from testbed.faults.stage import Stage

from wattspan.config import FleetSettings
from wattspan.fleet.allotment import AllotmentBook, accept_budgets
from wattspan.fleet.coordination import CoordinationError, KeyWrite
from wattspan.fleet.records import FleetKeys, encode

BUDGET = 900
"""Watts of the fleet; the devices of the emulated host may draw 1050 W."""
USER, ROOT = "wattspan", "root"
PREFIX = FleetSettings().prefix
WRITERS, KEYS_OF_A_WRITE = 8, 20


class FleetStage(Stage):
    """A stage whose agent is in a fleet, by TLS and with a password."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="wattspan-etcd-")
        self.etcd_folder = Path(self._temporary.name)
        self.authority = Authority(self.etcd_folder, "ours")
        self._served = self.authority.issue("server")
        tls = [f"--cert-file={self._served.certificate}", f"--key-file={self._served.key}"]
        self.etcd = EtcdCluster(self.etcd_folder, tls=tls, tls_ca=str(self.authority.certificate))
        self.flood: Flood | None = None
        try:
            self.etcd.__enter__()
            self.etcd.enable_authentication({ROOT: ROOT, USER: USER}, PREFIX)
            self.etcd.defaults |= {"user": ROOT, "password_file": str(self._password(ROOT))}
            book = accept_budgets(AllotmentBook(), {"": BUDGET * 1000})
            self.etcd.client().commit([KeyWrite(FleetKeys(PREFIX).book, encode(book))])
            super().__init__(
                profile="one-socket-h100",
                settings={
                    "fleet.endpoints": json.dumps(self.etcd.urls),
                    "fleet.name": "host-1",
                    "fleet.contact": "4s",
                    "fleet.fallback": "2s",
                    "fleet.tls_ca": self.authority.certificate,
                    "fleet.user": USER,
                    "fleet.password_file": self._password(USER),
                    "caps.users": "[]",
                    "caps.largest_step": "1.0",
                    "autotune.mode": "apply",
                },
            )
            self.until(lambda: in_contact(self.last), "an allotment", 60)
        except BaseException:
            self._end()
            raise

    def _password(self, user: str) -> Path:
        path = self.etcd_folder / f"password-{user}"
        path.write_text(user)
        path.chmod(0o600)
        return path

    def change_password(self, password: str) -> None:
        """Give the agent's user another password in etcd."""
        self.etcd.call("/v3/auth/user/changepw", {"name": USER, "password": password})

    def serve_with(self, authority: Authority) -> None:
        """Restart etcd with a certificate of an authority."""
        pair = authority.issue("next")
        self.etcd.kill(0)
        pair.certificate.replace(self._served.certificate)
        pair.key.replace(self._served.key)
        self.etcd.start(0)

    def watts(self) -> float:
        """The sum of the power limits in force."""
        with Limits(self.host.directory) as limits:
            return sum(limits.watts().values())

    def close(self) -> None:
        super().close()
        self._end()

    def _end(self) -> None:
        if self.flood is not None:
            self.flood.end()
        self.etcd.close()
        self._temporary.cleanup()


def of(stage: Stage) -> FleetStage:
    assert isinstance(stage, FleetStage)
    return stage


class Flood:
    """Writes under the prefix of the fleet, as many as etcd takes, until ``end``."""

    def __init__(self, stage: FleetStage) -> None:
        self._host = stage.etcd.urls[0].partition("://")[2]
        self._context = stage.authority.client()
        self.over, self._counts = threading.Event(), [0] * WRITERS
        self._threads = [
            threading.Thread(target=self._write, args=(number,), daemon=True)
            for number in range(WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def written(self) -> int:
        return sum(self._counts)

    def end(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join()

    def _write(self, number: int) -> None:
        puts = [
            {"request_put": {"key": _base64(f"{PREFIX}stranger/{number}-{key}"), "value": "eHh4"}}
            for key in range(KEYS_OF_A_WRITE)
        ]
        connection = http.client.HTTPSConnection(self._host, context=self._context, timeout=20)
        with contextlib.closing(connection):
            body = json.dumps({"name": USER, "password": USER})
            connection.request("POST", "/v3/auth/authenticate", body)
            token = json.loads(connection.getresponse().read())["token"]
            write = json.dumps({"success": puts})
            while not self.over.is_set():
                connection.request("POST", "/v3/kv/txn", write, {"Authorization": token})
                response = connection.getresponse()
                response.read()
                if response.status == http.client.OK:
                    self._counts[number] += KEYS_OF_A_WRITE
                    continue
                self.over.wait(0.1)  # the revision of users was changed, or etcd is busy


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# --------------------------------------------------------------------------- what is observed


def in_contact(sight: Sight) -> bool:
    return sight.total("wattspan_fleet_contact") == sight.total("wattspan_fleet_leader") == NANO


def allotted(before: Sight, at_end: Sight, now: Sight) -> bool:
    """The agent is healthy, and in contact with its fleet, which it leads."""
    return flowing(before, at_end, now) and in_contact(now)


BUDGET_KEPT = Claim(
    f"at most {BUDGET} W were allotted, and in force at the end",
    lambda stage, sights: (
        of(stage).watts() <= BUDGET
        and all(
            sight.total("wattspan_fleet_host_allotment_watts") <= BUDGET * NANO for sight in sights
        )
    ),
)


def _flooded(
    name: str, means: str, meanwhile: Callable[[FleetStage], object] = lambda _: None
) -> Fault:
    told: dict[str, float] = {}

    def inject(stage: Stage) -> None:
        told["began"] = stage.last.at
        of(stage).flood = Flood(of(stage))
        meanwhile(of(stage))

    def end(stage: Stage) -> None:
        flood, of(stage).flood = of(stage).flood, None
        flood.end()
        told["rate"] = flood.written * NANO / (stage.last.at - told["began"])
        of(stage).etcd.client().commit([KeyWrite(f"{PREFIX}stranger/0-0", None)])

    def kept(_: Stage, sights: Sequence[Sight]) -> bool:
        return all(in_contact(sight) for sight in sights)

    return Fault(
        name,
        inject,
        end,
        means,
        claims=[
            BUDGET_KEPT,
            Claim("contact and leadership were never lost", kept),
            Claim("the writes were made", lambda *_: told["rate"] > 100),
        ],
        lasts=20.0,
        short=3.0,
        well=allotted,
        note=lambda _: f"{told['rate']:.0f} writes a second",
    )


def _compact_repeatedly(stage: FleetStage) -> None:
    flood = stage.flood
    assert flood is not None

    def compact() -> None:
        while not flood.over.wait(0.2):
            with contextlib.suppress(CoordinationError):
                stage.etcd.compact()

    threading.Thread(target=compact, daemon=True).start()


def _restart(stage: Stage) -> None:
    of(stage).etcd.kill(0)


FAULTS = (
    _flooded(
        "a stranger writes without pause under the fleet's prefix",
        "The leader decides once for all writes that have arrived, and skips the rest. Grant no"
        " other user the prefix of the fleet.",
    ),
    _flooded(
        "the history of etcd is compacted five times a second during such writes",
        "A watch whose changes are forgotten is repeated; records are read anew.",
        _compact_repeatedly,
    ),
    Fault(
        "the member of etcd is killed and started, and has no token of its users any more",
        _restart,
        lambda stage: of(stage).etcd.start(0),
        "The agent authenticates again. Without contact the host has its safe allotment.",
        [down("fleet")],
        [BUDGET_KEPT],
        lasts=10.0,
        short=3.0,
        well=allotted,
    ),
    Fault(
        "the password of the agent's user is changed",
        lambda stage: of(stage).change_password("another"),
        lambda stage: of(stage).change_password(USER),
        "The agent reads its password file at each attempt: write the new password there.",
        [down("fleet")],
        [BUDGET_KEPT],
        lasts=10.0,
        short=3.0,
        well=allotted,
    ),
    Fault(
        "the certificate of etcd is replaced by one of an unknown authority",
        lambda stage: of(stage).serve_with(Authority(of(stage).etcd_folder, "theirs")),
        lambda stage: of(stage).serve_with(of(stage).authority),
        "The agent does not send its password. Set `tls_ca` in `[fleet]`.",
        [down("fleet")],
        [BUDGET_KEPT],
        lasts=10.0,
        short=3.0,
        well=allotted,
    ),
)
