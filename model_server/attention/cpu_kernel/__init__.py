"""Paged attention of decode steps, compiled for the CPU."""
