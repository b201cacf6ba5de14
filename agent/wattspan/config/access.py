"""The settings that every TCP listener has, in the words that each of its tables uses."""

from __future__ import annotations

from typing import Annotated, Protocol

from wattspan.model.settings import about

Certificate = Annotated[
    str,
    about(
        "A PEM file with the certificate and its chain; with it, TLS only. Read again when it "
        "changes, as the other three files are."
    ),
]
PrivateKey = Annotated[
    str, about('A PEM file with the key; "" if it is in the certificate\'s file.')
]
ClientAuthority = Annotated[
    str, about("A PEM file; with it, only clients with a certificate by this authority.")
]
TokenFile = Annotated[
    str,
    about(
        "A file with one token a line, that other users cannot read; with it, only clients that "
        "send one of them, as bearer token or as the password of any user."
    ),
]


class AccessSettings(Protocol):
    """A table with these keys."""

    @property
    def tls_certificate(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_ca(self) -> str: ...
    @property
    def token_file(self) -> str: ...


def check_access(settings: AccessSettings) -> None:
    """ValueError if the keys make no sense together."""
    if (settings.tls_key or settings.tls_client_ca) and not settings.tls_certificate:
        raise ValueError("tls_key and tls_client_ca are of no use without tls_certificate")
