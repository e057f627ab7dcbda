"""Checks of the index: speculative entries, mismatched tokens, the engines' own counters."""
