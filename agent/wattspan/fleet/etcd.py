"""coordination.Coordination on etcd's v3 API, over its gRPC gateway (HTTP and JSON).

Names and meanings of messages: etcd's `rpc.proto`, versions 3.4 and later, which serve the gateway
at `/v3`. Reads are linearizable, etcd's default. Keys and values are base64, 64-bit numbers are
decimal strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from wattspan.fleet.access import EtcdAccess
from wattspan.fleet.coordination import (
    ConflictError,
    KeyChange,
    KeyWrite,
    LeaseEndedError,
    PrefixState,
    RevisionCondition,
    StoredKey,
    WatchEndedError,
    check_commit,
)
from wattspan.fleet.gateway import EtcdGateway
from wattspan.fleet.http_client import JsonStream
from wattspan.ports import Clock

_ALL = b"\x00"
"""As a key, the first of all keys; as the end of a range, after the last one."""


class _ResponseHeader(msgspec.Struct):
    revision: int = 0


class _StoredPair(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class _RangeAnswer(msgspec.Struct):
    header: _ResponseHeader
    kvs: list[_StoredPair] = []


class _CommitAnswer(msgspec.Struct):
    header: _ResponseHeader
    succeeded: bool = False


class _GrantAnswer(msgspec.Struct):
    id: int = msgspec.field(name="ID")


class _Renewal(msgspec.Struct):
    ttl: int = msgspec.field(name="TTL", default=0)


class _RenewAnswer(msgspec.Struct):
    result: _Renewal


class _WatchEvent(msgspec.Struct):
    kv: _StoredPair
    type: str = "PUT"


class _WatchResult(msgspec.Struct):
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[_WatchEvent] = []


class _WatchAnswer(msgspec.Struct):
    result: _WatchResult | None = None
    error: Any = None


_WATCH_DECODER = msgspec.json.Decoder(_WatchAnswer, strict=False)


class EtcdCoordination:
    """A client of an etcd cluster. Safe from any thread."""

    def __init__(self, access: EtcdAccess, clock: Clock) -> None:
        self._gateway = EtcdGateway(access, clock)

    def read(self, prefix: str) -> PrefixState:
        answer = self._gateway.call("/v3/kv/range", _range_of(prefix), _RangeAnswer)
        return PrefixState(tuple(map(_stored, answer.kvs)), answer.header.revision)

    def commit(
        self, writes: Sequence[KeyWrite], conditions: Sequence[RevisionCondition] = ()
    ) -> int:
        check_commit(writes, conditions)
        request = {
            "compare": [
                {
                    "key": condition.key.encode(),
                    "target": "MOD",
                    "result": "EQUAL",
                    "mod_revision": str(condition.revision),
                }
                for condition in conditions
            ],
            "success": list(map(_operation, writes)),
        }
        try:
            answer = self._gateway.call("/v3/kv/txn", request, _CommitAnswer, repeatable=False)
        except KeyError as error:
            raise LeaseEndedError(f"etcd refuses a key: {error.args[0]}.") from None
        if not answer.succeeded:
            keys = ", ".join(condition.key for condition in conditions)
            raise ConflictError(f"One of {keys} was changed by another participant.")
        return answer.header.revision

    def grant(self, seconds: int) -> int:
        return self._gateway.call("/v3/lease/grant", {"TTL": str(seconds)}, _GrantAnswer).id

    def renew(self, lease: int) -> None:
        answer = self._gateway.call("/v3/lease/keepalive", {"ID": str(lease)}, _RenewAnswer)
        if answer.result.ttl <= 0:
            raise LeaseEndedError(f"Lease {lease:x} has ended.")

    def revoke(self, lease: int) -> None:
        with suppress(KeyError):  # it has ended
            self._gateway.call("/v3/lease/revoke", {"ID": str(lease)}, _RangeAnswer)

    def watch(self, prefix: str, after: int) -> EtcdChanges:
        create = _range_of(prefix) | {"start_revision": str(after + 1)}
        return EtcdChanges(self._gateway.stream("/v3/watch", {"create_request": create}))

    def close(self) -> None:
        self._gateway.close()


class EtcdChanges:
    """The changes of a prefix in an etcd cluster."""

    def __init__(self, stream: JsonStream) -> None:
        self._stream = stream

    def wait(self, seconds: float) -> tuple[KeyChange, ...]:
        try:
            while (message := self._stream.next(seconds)) is not None:
                if changes := self._changes(message):
                    return changes
        except (ConnectionError, ValueError, RecursionError) as error:
            self.close()
            raise WatchEndedError(
                f"The changes of etcd at {self._stream.endpoint} ended: {error}. They are read"
                " again."
            ) from None
        return ()

    def close(self) -> None:
        self._stream.close()

    def _changes(self, message: bytes) -> tuple[KeyChange, ...]:
        answer = _WATCH_DECODER.decode(message)
        result = answer.result
        if result is None:
            raise ConnectionResetError(f"it refuses ({answer.error})")
        if result.compact_revision:
            raise ConnectionResetError(f"changes before {result.compact_revision} are forgotten")
        if result.canceled:
            raise ConnectionResetError(result.cancel_reason or "it ended the watch")
        return tuple(map(_change, result.events))


def _range_of(prefix: str) -> dict[str, bytes]:
    """The request for all keys that begin with ``prefix``."""
    first = prefix.encode()
    if not first:
        return {"key": _ALL, "range_end": _ALL}
    return {"key": first, "range_end": first[:-1] + bytes([first[-1] + 1])}  # UTF-8 has no 0xff


def _operation(write: KeyWrite) -> dict[str, Any]:
    key = write.key.encode()
    if write.value is None:
        return {"request_delete_range": {"key": key}}
    return {"request_put": {"key": key, "value": write.value, "lease": str(write.lease)}}


def _stored(sent: _StoredPair) -> StoredKey:
    key = sent.key.decode("utf-8", "replace")
    return StoredKey(key, sent.value, sent.mod_revision, sent.lease)


def _change(event: _WatchEvent) -> KeyChange:
    stored = _stored(event.kv)
    return KeyChange(stored.key, None if event.type == "DELETE" else stored, stored.revision)
