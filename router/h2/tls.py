"""TLS of one connection in memory: records in, plaintext out and the reverse, without a socket."""

from __future__ import annotations

import ssl
from typing import Final

# First byte of a TLS handshake record; HTTP/2 in plaintext starts with another byte.
HANDSHAKE: Final = 0x16

_READ_BYTES = 256 << 10


class TlsLayer:
    """Server side of one TLS connection; not thread-safe."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_open = False  # whether the handshake is complete, so that plaintext may be sent
        self.is_closed = False  # whether the client has closed TLS

    def receive(self, records: bytes) -> bytes:
        """Return the plaintext that these records complete.

        Raises:
            ssl.SSLError: Invalid records or a failed handshake; `data_to_send` returns the alert to send.
        """
        self._incoming.write(records)
        parts = []
        try:
            if not self.is_open:
                self._tls.do_handshake()
                self.is_open = True
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
            self.is_closed = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_closed = True
        return b"".join(parts)

    def data_to_send(self) -> bytes:
        """Return records to send that carry no plaintext: handshakes, tickets, alerts."""
        return self._outgoing.read()

    def sealed(self, plaintext: bytes) -> bytes:
        """Encrypt plaintext and return it after other pending records; only when `is_open`."""
        self._tls.write(plaintext)
        return self._outgoing.read()
