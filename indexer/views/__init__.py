"""Pod views: apply the events of one engine to its blocks in the index."""
