"""Capacity planning: memory, concurrency and speed of a model on GPUs, computed without torch."""
