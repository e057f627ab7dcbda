"""Exchange of views with other routers."""

from indexer.peers.service import PeerIdentity, open_channel, resolve

__all__ = [
    "PeerIdentity",
    "open_channel",
    "resolve",
]
