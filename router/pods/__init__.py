"""Pod set, load table, probes and readiness."""
