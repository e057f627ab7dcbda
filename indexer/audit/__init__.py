"""Is the index right: speculation, mismatched tokens, the engines' own counters."""
