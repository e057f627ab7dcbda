"""Code shared by all programs: flags, compiled kernels, counters, rate-limited logs, HTTP pages, TLS."""
