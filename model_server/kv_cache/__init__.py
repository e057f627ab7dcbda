"""KV blocks: allocation, prefix reuse, eviction, the host tier."""
