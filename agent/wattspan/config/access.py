"""Settings of TLS and tokens, which every TCP listener has."""

from __future__ import annotations

from typing import Annotated, Protocol

from wattspan.model.settings import about

Certificate = Annotated[
    str,
    about(
        "PEM file with the certificate and its chain; the listener then accepts TLS only. The "
        "agent reads this file and the next three again when they change."
    ),
]
PrivateKey = Annotated[
    str, about('PEM file with the key; "" if the file of the certificate holds it.')
]
ClientAuthority = Annotated[
    str, about("PEM file of an authority; the listener then requires client certificates by it.")
]
TokenFile = Annotated[
    str,
    about(
        "File with one token per line, unreadable for other users. The listener then requires "
        "one of them, as bearer token or as password of any user."
    ),
]


class AccessSettings(Protocol):
    """A table with the keys of TLS and tokens."""

    @property
    def tls_certificate(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_ca(self) -> str: ...
    @property
    def token_file(self) -> str: ...


def check_access(settings: AccessSettings) -> None:
    """Raise ValueError for keys that contradict each other."""
    if (settings.tls_key or settings.tls_client_ca) and not settings.tls_certificate:
        raise ValueError("tls_key and tls_client_ca need tls_certificate")
