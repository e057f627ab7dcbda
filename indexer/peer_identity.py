"""What two indexes must have in common so that one can go on from the other's views, and who they are.

Keys mean the same only under the same seed and block length. The fingerprint shows that both know the seed,
without telling it: whoever does not know it is told nothing.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from indexer.errors import PeerError
from indexer.peer_wire import SCHEMA


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """One index, as its peers see it.

    Attributes:
        fingerprint: See `BlockHasher.fingerprint`.
        form: What its views are made of, see `peer_wire.FORM`.
        tiers: Its tiers' names, best first; a tier's number is its place.
        schema: See `peer_wire.SCHEMA`.
        instance: Of this process; a peer that has the same is itself.
    """

    fingerprint: int
    form: str
    tiers: tuple[str, ...]
    schema: int = SCHEMA
    instance: str = field(default_factory=lambda: secrets.token_hex(16))

    def admit(self, other: PeerIdentity) -> None:
        """Checks that another index can use our views.

        Raises:
            PeerError: It cannot, or is ourselves; carries the reason.
        """
        if other.instance == self.instance:
            raise PeerError("self", "that is the same process")
        if other.schema != self.schema:
            raise PeerError("schema", f"snapshots of version {self.schema} are told, not {other.schema}")
        if other.fingerprint != self.fingerprint:
            raise PeerError("fingerprint", "--hash-seed and --block-tokens must be the same as here")
        if other.form != self.form:
            raise PeerError("backend", f"views have the form {self.form!r} here")
        if other.tiers != self.tiers:
            raise PeerError("tiers", f"tiers must be {', '.join(self.tiers)}, as here")
