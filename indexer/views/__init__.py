"""Views: events of one engine, applied to its blocks in the index."""
