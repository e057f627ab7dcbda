"""Paged attention of decoding, compiled for the processor."""
