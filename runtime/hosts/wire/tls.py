"""What travels between hosts: connections by TLS 1.3, and sealed messages, for which the secret of
the run stands.

Who listens makes a key and a self-signed certificate when it starts, unless it is given a file with
both; the key never leaves its process. Nobody need have signed it: each side proves, by a hash
keyed with the secret of the certificate and a number that the other one has drawn, that it knows
the secret and sees this certificate. So nobody can stand between the two, and the secret itself
never travels.

Secrets of processes are sealed besides, for connections in plain (``--no-tls``) and for the store
of torchrun: by AES-GCM, with a key that HKDF derives from the secret of the run. Certificates and
seals are made by the library `cryptography`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

TLS = "tls:"
"""Before HOST:PORT in the name of a socket: what travels is encrypted."""
LOOK_EVERY_S = 0.2
"""How often a wait looks whether the run has stopped."""
_KEY_BYTES = 32
_NONCE_BYTES = 12
"""Of AES-GCM; drawn at random for each message (source: NIST SP 800-38D, at most 2**32 a key)."""
_VALID_FOR = timedelta(days=3650)
"""A certificate is as old as its process."""
_MOST_BYTES = 1 << 18
"""Bytes of one call of OpenSSL, for which others wait."""
_RECORD_BYTES = 1 << 14
"""Bytes of one record of TLS, at most."""
T = TypeVar("T")


def named(at: str, *, tls: bool) -> str:
    """The name of a socket at HOST:PORT: encrypted, but on the loopback device."""
    is_loopback = at.startswith(("127.", "localhost:", "[::1]:"))
    return f"{TLS}{at}" if tls and not is_loopback else at


def proof(secret: str, side: str, fingerprint: str = "", nonce: str = "") -> str:
    """That this side (``client`` or ``server``) knows the secret, sees that certificate and has
    been given the ``nonce`` that the other one has drawn."""
    known = f"{side} {fingerprint} {nonce}".encode(errors="replace")
    return hmac.new(secret.encode(), known, "sha256").hexdigest()


def sealed(data: bytes, secret: str, about: str) -> bytes:
    """The data for processes of other hosts that know the ``secret``; nobody else can read or
    change it. ``about``: what it is and for whom; who opens it must expect the same, so that a
    message that is sent again elsewhere is refused. Raises ValueError without `cryptography`."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + bytes(_cipher(secret).encrypt(nonce, data, about.encode(errors="replace")))


def unsealed(data: bytes, secret: str, about: str) -> bytes:
    """What `sealed` was given; raises ValueError where it was sealed with another secret or about
    something else, or where a byte has changed or is missing."""
    cipher = _cipher(secret)
    with _cryptography():
        from cryptography.exceptions import InvalidTag
    if len(data) < _NONCE_BYTES:
        raise ValueError("too short to be sealed")
    nonce = data[:_NONCE_BYTES]
    try:
        return bytes(cipher.decrypt(nonce, data[_NONCE_BYTES:], about.encode(errors="replace")))
    except InvalidTag:
        raise ValueError("sealed with another secret, or not for this place") from None


def _cipher(secret: str) -> Any:
    """AES-GCM with the key that belongs to the secret of a run."""
    with _cryptography():
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    derived = HKDF(SHA256(), _KEY_BYTES, salt=None, info=b"persia-testbed: sealed messages")
    return AESGCM(derived.derive(secret.encode()))


@contextmanager
def _cryptography() -> Iterator[None]:
    """An import of the library; where it is missing a sentence says what installs it."""
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"processes of several hosts need the library cryptography ({error}); run"
            " `pip install 'persia-testbed[cluster]'` on every host"
        ) from None


class Certificate:
    """The certificate of a process that listens."""

    def __init__(self, file: Path | None = None) -> None:
        """``file``: a certificate, those that signed it, and its key, as PEM; else one is made.
        Raises ValueError where it cannot be had."""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # else a client has something to read that is no message

        # Its digest travels with the address and the secret: that is whom a client trusts.
        pem = _made_now() if file is None else _read(file)
        try:
            self.fingerprint = hashlib.sha256(_first_certificate(pem)).hexdigest()
            self._load(pem)
        except ValueError as error:  # of ssl, too
            raise ValueError(
                f"--certificate {file}: {error}; it must hold a certificate and its key without a"
                " password, as PEM"
            ) from None

    def _load(self, pem: str) -> None:
        # Python reads it from a file: one in memory, which no disk keeps.
        note = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(note, pem.encode())
            # Without a password: OpenSSL would ask for one on the terminal.
            self.context.load_cert_chain(f"/proc/self/fd/{note}", password="")
        except ssl.SSLError as error:
            raise ValueError(str(error)) from None
        finally:
            os.close(note)


def _read(file: Path) -> str:
    try:
        return file.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--certificate {file} cannot be read: {error}") from None


def _first_certificate(pem: str) -> bytes:
    begins = pem.find("-----BEGIN CERTIFICATE-----")
    ends = pem.find(ssl.PEM_FOOTER, begins)
    if begins < 0 or ends < 0:
        raise ValueError("there is no certificate in it")
    return ssl.PEM_cert_to_DER_cert(pem[begins : ends + len(ssl.PEM_FOOTER)])


def _made_now() -> str:
    """A key and a self-signed certificate of this process alone, as PEM."""
    with _cryptography():
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "persia-testbed")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # the clock of another host may be behind
        .not_valid_after(now + _VALID_FOR)
        .sign(key, SHA256())
    )
    of_key = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return (of_key + certificate.public_bytes(Encoding.PEM)).decode()


class TlsSocket:
    """An encrypted socket with a time-out. OpenSSL is called by one thread at a time, which waits
    for the network outside of the call: so one may send while another receives."""

    def __init__(self, sock: socket.socket, certificate: Certificate | None = None) -> None:
        """``certificate``: of this side, which listens; else hands are shaken within the time-out
        of the socket. Raises OSError."""
        self._certificate = certificate
        self._turn = threading.Lock()
        self._waits_s = LOOK_EVERY_S
        context = certificate.context if certificate else _of_client()
        waits = certificate is None
        self._tls: Any = context.wrap_socket(
            sock, server_side=not waits, do_handshake_on_connect=waits
        )
        self._tls.setblocking(False)
        self.family = sock.family
        self.fileno = self._tls.fileno
        self.close = self._tls.close
        self.setsockopt = self._tls.setsockopt
        self.getpeername = self._tls.getpeername
        self.pending = self._tls.pending

    def settimeout(self, seconds: float) -> None:
        """Let one call take so many seconds; 0: BlockingIOError at once."""
        self._waits_s = seconds

    def fingerprint(self) -> str:
        """Digest of the certificate of the listening end."""
        if self._certificate is not None:
            return self._certificate.fingerprint
        return hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").hexdigest()

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Receive as a socket does; what is only looked at may be encrypted still."""
        if not flags:
            return bytes(self._in_turn(lambda: self._tls.read(size)))
        try:
            return b"?" if self.pending() else socket.socket.recv(self._tls, size, flags)
        except BlockingIOError:
            raise TimeoutError from None

    def recv_into(self, view: memoryview) -> int:
        """Receive into the view; OpenSSL gives a record at a time, and asks the kernel twice."""
        return self._in_turn(lambda: self._records(view[:_MOST_BYTES]))

    def sendmsg(self, buffers: list[memoryview]) -> int:
        """Some bytes of the first, with short ones those behind it: each call is a packet, and
        perhaps a wake of the other end. After a TimeoutError only the same may be sent."""
        data: memoryview | bytes = buffers[0][:_MOST_BYTES]
        if len(buffers) > 1 and len(data) < _RECORD_BYTES:
            data = b"".join((data, buffers[1][:_RECORD_BYTES]))[:_RECORD_BYTES]
        return int(self._in_turn(lambda: self._tls.write(data)))

    def shutdown(self, how: int) -> None:
        """Shut the socket below down: what has come can still be decrypted."""
        socket.socket.shutdown(self._tls, how)

    def _records(self, view: memoryview) -> int:
        """What has come of them, or what nothing of them raises."""
        count: int = self._tls.read(len(view), view)
        with suppress(ssl.SSLWantReadError):
            while count < len(view) and (more := self._tls.read(len(view) - count, view[count:])):
                count += more
        return count

    def _in_turn(self, call: Callable[[], T]) -> T:
        # Try the call; OpenSSL says what it waits for.
        ends_s = time.monotonic() + self._waits_s
        while True:
            try:
                with self._turn:
                    return call()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            except ValueError as error:  # it was closed meanwhile
                raise OSError(str(error)) from None

            # Wait for that without holding the turn, so that the other direction may go on.
            if not self._waits_s:
                raise BlockingIOError
            ready: Any = select.poll()
            if (number := self.fileno()) < 0:
                raise OSError("closed")
            ready.register(number, event)
            if not ready.poll(max(0.0, ends_s - time.monotonic()) * 1000):
                raise TimeoutError


def _of_client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the secret says who it is, not a name
    context.verify_mode = ssl.CERT_NONE
    return context
