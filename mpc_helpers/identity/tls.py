"""Mutual TLS between helpers, each with one self-signed certificate that is pinned by its SHA-256.

There is no certificate authority: a peer is identified by the private key of the certificate that the helper set pins.
Python's `ssl` requests a client certificate only if it has certificates to verify it against, so connections are set up
from the peers' certificates (`fetch_certificate` fetches one by its pin), and the pin is then compared per party: it is
not enough that a certificate is trusted, it must be that helper's.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
import hmac
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from protocol.errors import ErrorKind, ProtocolError, TrefoilError
from protocol.files import read_private_file, write_private_file

VALID_DAYS = 825
# X.520's limit on a certificate's common name, in characters.
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """The paths of this helper's certificate (public) and its key (a private file)."""

    certificate: Path
    key: Path

    def __post_init__(self) -> None:
        if not self.certificate.is_absolute() or not self.key.is_absolute():
            message = "a TLS identity is named by absolute paths, as the worker starts elsewhere"
            raise ProtocolError(message, kind=ErrorKind.INVALID_VALUE)

    @property
    def der(self) -> bytes:
        return load_certificate(self.certificate)

    @property
    def pin(self) -> bytes:
        """The SHA-256 that the helper set contains for this helper."""
        return pin_of(self.der)


def make_identity(directory: Path, name: str, now: int, *, days: int = VALID_DAYS) -> TlsIdentity:
    """Create a P-256 key and a self-signed certificate. Run by an operator; never overwrites a key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    start = datetime.datetime.fromtimestamp(now, datetime.UTC) - datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=days + 1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    identity = TlsIdentity((directory / "tls.crt").absolute(), (directory / "tls.key").absolute())
    write_private_file(identity.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    identity.certificate.write_bytes(certificate.public_bytes(Encoding.PEM))
    return identity


def load_certificate(path: Path) -> bytes:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)
    except OSError as error:
        hint = "Make one with: trefoil keygen"
        raise TrefoilError(f"cannot read {path}: {error.strerror}", hint, kind=ErrorKind.FILE_UNREADABLE) from None
    except ValueError:
        hint = "Make one with: trefoil keygen"
        raise TrefoilError(f"{path} contains no certificate", hint, kind=ErrorKind.WRONG_FILE) from None


def ends(der: bytes) -> int:
    """Return when a certificate expires, in Unix time."""
    return int(x509.load_der_x509_certificate(der).not_valid_after_utc.timestamp())


def pin_of(der: bytes) -> bytes:
    """Return the SHA-256 of a certificate's DER bytes, which `aiohttp.Fingerprint` compares too."""
    return hashlib.sha256(der).digest()


def same_pin(der: bytes | None, pin: bytes) -> bool:
    """Return whether a peer presented a certificate, and it is the pinned one."""
    return der is not None and hmac.compare_digest(pin_of(der), pin)


def server_context(identity: TlsIdentity, trusted: tuple[bytes, ...] = ()) -> ssl.SSLContext:
    """Return a context for listening. With `trusted` certificates (DER), clients must present one of them."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    if trusted:
        _trust(context, trusted)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(identity: TlsIdentity | None, trusted: tuple[bytes, ...]) -> ssl.SSLContext:
    """Return a context for connecting to a peer with a `trusted` certificate (DER), presenting our own if given."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, identity)
    # The pin is stronger than a host name in a self-signed certificate.
    context.check_hostname = False
    _trust(context, trusted)
    return context


def _context(purpose: int, identity: TlsIdentity | None) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if identity is not None:
        read_private_file(identity.key)  # refuses a key that others can read
        try:
            context.load_cert_chain(identity.certificate, identity.key)
        except (OSError, ssl.SSLError) as error:
            message = f"cannot use {identity.certificate} with {identity.key}: {error}"
            hint = "Name the key that was made with the certificate, or make both again: trefoil keygen tls"
            raise TrefoilError(message, hint, kind=ErrorKind.WRONG_KEY) from None
    return context


def _trust(context: ssl.SSLContext, trusted: tuple[bytes, ...]) -> None:
    for der in trusted:
        try:
            context.load_verify_locations(cadata=der)
        except ssl.SSLError as error:
            raise ProtocolError(f"a peer's certificate cannot be read: {error}") from None


async def fetch_certificate(host: str, port: int, pin: bytes, seconds: float) -> bytes:
    """Return a peer's certificate (DER) from its HTTPS port, if it has the pinned SHA-256.

    Sends nothing. The handshake proves that the server holds the certificate's key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port, ssl=context, ssl_shutdown_timeout=1.0)
    except TimeoutError:
        raise TrefoilError(f"{where} has not responded for {seconds:g} s", kind=ErrorKind.TIMEOUT) from None
    except OSError as error:
        raise TrefoilError(f"cannot connect to {where}: {error}", kind=ErrorKind.UNREACHABLE) from None
    try:
        der: bytes | None = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        # Nothing was sent, so no orderly shutdown is needed: a slow peer must not keep the connection open.
        writer.transport.abort()
        with contextlib.suppress(OSError, TimeoutError):
            await writer.wait_closed()
    if der is None or not same_pin(der, pin):
        raise TrefoilError(
            f"{where} presents a certificate other than the pinned one",
            "Someone is in between, or the helper has a new certificate: ask its operator for the new helper set.",
            kind=ErrorKind.WRONG_KEY,
        )
    return der
