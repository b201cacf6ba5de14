"""Certificates for tests, without key identifiers, as OpenSSL 3.0 makes them."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """Issues certificates for loopback into one folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        signed = self._sign(name, self._key, authority=True)
        self.certificate = self._write(f"{name}.pem", _pem(signed))

    def issue(self, name: str) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(name, key, authority=False)
        return Pair(
            self._write(f"{name}.pem", _pem(certificate)),
            self._write(f"{name}.key", key_pem(key)),
        )

    def client(self, pair: Pair | None = None) -> ssl.SSLContext:
        """A client that trusts this authority, with a certificate of its own or without."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        # Python 3.13 and newer would require key identifiers, which the certificates do not have.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if pair is not None:
            context.load_cert_chain(pair.certificate, pair.key)
        return context

    def _sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, authority: bool
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        loopback = [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName(loopback), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _write(self, name: str, content: bytes) -> Path:
        path = self._folder / name
        path.write_bytes(content)
        path.chmod(0o640)  # some of them are keys
        return path


def key_pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        encryption = serialization.BestAvailableEncryption(passphrase)
    pkcs8 = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, pkcs8, encryption)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
