"""Profile handlers: which profiles run for a request, and which headers tell the pods of their picks.

The first picks for everything; the second disaggregates: it picks who decodes, who prefills and who encodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.plugins.api import Endpoint, PluginRequest
from router.plugins.deciders import Decider
from router.plugins.profiles import Picked, Profile

PREFILLER_HEADER = "x-prefiller-host-port"
ENCODERS_HEADER = "x-encoder-hosts-ports"
HANDLER_HEADERS = frozenset({PREFILLER_HEADER, ENCODERS_HEADER})
"""Only the router may set these; a client's are taken off."""


@dataclass(frozen=True, slots=True)
class Handled:
    """What the profiles chose.

    Attributes:
        primary: Where the request goes.
        targets: First picks by profile; "" is where the request goes.
        headers: To set on the request.
        prefill: Who prefills, where it is not the primary; else None.
    """

    primary: Picked
    targets: Mapping[str, Endpoint]
    headers: Mapping[str, str] = field(default_factory=dict)
    prefill: Endpoint | None = None


class ProfileHandler(Protocol):
    """Runs profiles."""

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Handled | None:
        """Picks; None when no endpoint passes the filters."""


class SingleProfile:
    """One profile for all."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Handled | None:
        picked = self._profile.run(request, endpoints)
        if picked is None:
            return None
        first = picked.endpoints[0]
        return Handled(picked, {"": first, self._profile.name: first})


class Disaggregated:
    """Decoding on one pod, and where a decider says so prefilling and encoding on others.

    Args:
        decode, prefill, encode: Profiles; the request goes to the first one's pick, which fetches from the
            others'. None: that stage is never apart.
        prefill_decider, encode_decider: None: never.
        prefill_first: Whether prefill is picked before decode, without regard to the latter's cache.
    """

    def __init__(
        self,
        decode: Profile,
        prefill: Profile | None = None,
        encode: Profile | None = None,
        *,
        prefill_decider: Decider | None = None,
        encode_decider: Decider | None = None,
        prefill_first: bool = False,
    ) -> None:
        self._decode = decode
        self._prefill = prefill
        self._encode = encode
        self._prefill_decider = prefill_decider
        self._encode_decider = encode_decider
        self._prefill_first = prefill_first

    def run(self, request: PluginRequest, endpoints: Sequence[Endpoint]) -> Handled | None:
        """Picks; a stage whose filters leave nobody stays with the decoding pod."""
        prefilled = None
        if self._prefill_first:
            prefilled = self._stage(self._prefill, self._prefill_decider, request, endpoints, None)
        decoded = self._decode.run(request, endpoints)
        if decoded is None:
            return None
        first = decoded.endpoints[0]
        if not self._prefill_first:
            prefilled = self._stage(self._prefill, self._prefill_decider, request, endpoints, first)
        encoded = self._stage(self._encode, self._encode_decider, request, endpoints, first)
        targets, headers = {"": first, self._decode.name: first}, {}
        if prefilled is not None and self._prefill is not None:
            targets[self._prefill.name] = prefilled.endpoints[0]
            headers[PREFILLER_HEADER] = prefilled.endpoints[0].address
        if encoded is not None and self._encode is not None:
            targets[self._encode.name] = encoded.endpoints[0]
            headers[ENCODERS_HEADER] = ",".join(endpoint.address for endpoint in encoded.endpoints)
        prefill = prefilled.endpoints[0] if prefilled is not None else None
        apart = prefill is not None and prefill.address != first.address
        return Handled(decoded, targets, headers, prefill if apart else None)

    def _stage(
        self,
        profile: Profile | None,
        decider: Decider | None,
        request: PluginRequest,
        endpoints: Sequence[Endpoint],
        decoder: Endpoint | None,
    ) -> Picked | None:
        if profile is None or decider is None or not decider.decide(request, decoder):
            return None
        return profile.run(request, endpoints)
