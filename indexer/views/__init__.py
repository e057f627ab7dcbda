"""Events of one engine to its blocks in the index."""
