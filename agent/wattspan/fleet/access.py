"""Addresses and credentials of an etcd cluster."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wattspan.config import FleetSettings
from wattspan.config.fleet import EtcdEndpoint, parse_endpoint
from wattspan.http.access_policy import is_world_accessible, load_certificate, readable_pem
from wattspan.model import SECOND
from wattspan.ports import ConfigError
from wattspan.util.files import read_regular

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
        """WattspanError if a file is unreadable or invalid."""
        what, where = "Cannot reach etcd", "in [fleet]"
        context = ssl.create_default_context()
        if self.authority:
            readable_pem("tls_ca", self.authority, where)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            try:
                context.load_verify_locations(self.authority)
            except ssl.SSLError:
                raise ConfigError(
                    f"{what} over TLS: {self.authority} holds no certificate in PEM form; correct"
                    f" tls_ca {where}."
                ) from None
        if self.certificate:
            load_certificate(context, self.certificate, self.key, what, where)
        return context

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
