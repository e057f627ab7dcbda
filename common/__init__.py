"""Parts that all programs share: flags, compiled kernels, counters, limited logs, HTTP pages, TLS files."""
