"""One connection's TLS: records in, plaintext out, and the other way round, without a socket."""

from __future__ import annotations

import ssl
from typing import Final

# A record's type; HTTP/2 in plaintext begins with another byte.
HANDSHAKE: Final = 0x16

_READ_BYTES = 256 << 10


class TlsLayer:
    """The server's end; not safe to share between threads."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.is_open = False  # whether the handshake is done, so that plaintext may be sent
        self.is_over = False  # whether the client has ended TLS: nothing more will come

    def receive(self, records: bytes) -> bytes:
        """Return the plaintext that is complete with these bytes.

        Raises:
            ssl.SSLError: What came is no TLS, or not ours; `take_out` has the alert for the client.
        """
        self._incoming.write(records)
        parts = []
        try:
            if not self.is_open:
                self._tls.do_handshake()
                self.is_open = True
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
            self.is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_over = True
        return b"".join(parts)

    def take_out(self) -> bytes:
        """Return the records that are to be sent beside plaintext: handshakes, tickets, alerts."""
        return self._outgoing.read()

    def sealed(self, plaintext: bytes) -> bytes:
        """Return plaintext as records, behind what else is to be sent; only when `is_open`."""
        self._tls.write(plaintext)
        return self._outgoing.read()
