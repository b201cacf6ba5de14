"""Addresses and credentials of an etcd cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from wattspan.config import FleetSettings
from wattspan.config.fleet import EtcdEndpoint, parse_endpoint
from wattspan.http.access_policy import client_tls, is_world_accessible
from wattspan.model import SECOND
from wattspan.ports import ConfigError
from wattspan.util.files import read_regular

if TYPE_CHECKING:
    import ssl

_MAX_PASSWORD_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Addresses and credentials of an etcd cluster. Files are read at each use.

    ``authority`` is the file of the certificates that sign the members', by default the host's
    trusted ones; ``certificate`` and ``key`` are the client's. ``timeout`` is in nanoseconds.
    """

    endpoints: tuple[EtcdEndpoint, ...]
    authority: str = ""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    timeout: int = 3 * SECOND

    @classmethod
    def configured(cls, settings: FleetSettings) -> EtcdAccess:
        return cls(
            tuple(map(parse_endpoint, settings.endpoints)),
            settings.tls_ca,
            settings.tls_certificate,
            settings.tls_key,
            settings.user,
            settings.password_file,
            settings.call_timeout,
        )

    def tls_context(self) -> ssl.SSLContext:
        """AccessError if a file is unreadable or invalid."""
        files = self.authority, self.certificate, self.key
        return client_tls(*files, what="Cannot reach etcd", where="in [fleet]")

    def password(self) -> str:
        """The password in its file; ConfigError."""
        path = self.password_file
        try:
            content, status = read_regular(Path(path), _MAX_PASSWORD_BYTES)
        except OSError as error:
            raise ConfigError(
                f"Cannot read the password of etcd in {path}: {error.strerror}. Correct"
                " password_file in [fleet]."
            ) from None
        if is_world_accessible(status.st_mode):
            raise ConfigError(
                f"Cannot use the password of etcd in {path}: other users can read or change it;"
                f" run `chmod 0640 {path}`."
            )
        return content.decode("utf-8", "replace").strip()
