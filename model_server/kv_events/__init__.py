"""Events of the cache: hashes, layout, publisher, replay."""
