"""Encrypted connections between hosts: TLS 1.3, and a certificate for which the secret stands.

Who listens makes a key and a self-signed certificate when it starts, by the `openssl` command (the
standard library has no call for that); the key never leaves its process. Nobody else signs it: each
side proves, by a hash keyed with the secret of the certificate and a number that the other one has
drawn, that it knows the secret and sees this certificate. So nobody can stand between the two, and
the secret itself never travels.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

TLS = "tls:"
"""Before HOST:PORT in the name of a socket: what travels is encrypted."""
LOOK_EVERY_S = 0.2
"""How often a wait looks whether the run has stopped."""
_SALT_BYTES = 32
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


def sealed(data: bytes, secret: str) -> bytes:
    """The data for processes of other hosts that know the ``secret``; nobody else can read or
    change it. Hidden by the stream of a keyed SHAKE-256, authenticated by an HMAC."""
    salt = os.urandom(_SALT_BYTES)
    hidden = _hide(data, secret, salt)
    return salt + hmac.digest(secret.encode(), salt + hidden, "sha256") + hidden


def unsealed(data: bytes, secret: str) -> bytes:
    """What `sealed` was given; raises ValueError where that was done with another secret."""
    mark_ends = _SALT_BYTES + hashlib.sha256().digest_size
    salt = data[:_SALT_BYTES]
    mark = data[_SALT_BYTES:mark_ends]
    hidden = data[mark_ends:]
    if not hmac.compare_digest(hmac.digest(secret.encode(), salt + hidden, "sha256"), mark):
        raise ValueError("sealed with another secret")
    return _hide(hidden, secret, salt)


def _hide(data: bytes, secret: str, salt: bytes) -> bytes:
    """Hidden, or read again."""
    stream = hashlib.shake_256(b"address of servers" + salt + secret.encode()).digest(len(data))
    return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))


class Certificate:
    """The certificate of a process that listens."""

    def __init__(self) -> None:
        """Raises ValueError where it cannot be made."""
        # A key and a certificate of this process alone, made now.
        line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
        words = [*line.split(), "-subj", "/CN=persia-testbed", "-days", "3650", "-keyout", "-"]
        try:
            pem = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"a connection is encrypted with a certificate of the `openssl` command, which"
                f" fails here ({error}); install it, or say --no-tls on both sides"
            ) from None

        # Its digest travels with the address and the secret: that is whom a client trusts.
        certificate = ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE") :])
        self.fingerprint = hashlib.sha256(certificate).hexdigest()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0  # else a client has something to read that is no message

        # Python reads it from a file: one in memory, which no disk keeps.
        note = os.memfd_create("certificate", os.MFD_CLOEXEC)
        try:
            os.write(note, pem.encode())
            self.context.load_cert_chain(f"/proc/self/fd/{note}")
        finally:
            os.close(note)


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
