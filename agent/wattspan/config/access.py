"""Settings of TLS and tokens, which every TCP listener has."""

from __future__ import annotations

from typing import Annotated

from wattspan.model.settings import Table, about


class AccessSettings(Table, frozen=True):
    """The keys of TLS and tokens, for the table of a listener."""

    tls_certificate: Annotated[
        str,
        about(
            "PEM file with the certificate and its chain; the listener then accepts TLS only. The "
            "agent reads this file and the next three again when they change."
        ),
    ] = ""
    tls_key: Annotated[
        str, about('PEM file with the key; "" if the file of the certificate holds it.')
    ] = ""
    tls_client_ca: Annotated[
        str,
        about("PEM file of an authority; the listener then requires client certificates by it."),
    ] = ""
    token_file: Annotated[
        str,
        about(
            "File with one token per line, unreadable for other users. The listener then requires "
            "one of them, as bearer token or as password of any user."
        ),
    ] = ""

    def __post_init__(self) -> None:
        if (self.tls_key or self.tls_client_ca) and not self.tls_certificate:
            raise ValueError("tls_key and tls_client_ca need tls_certificate")
