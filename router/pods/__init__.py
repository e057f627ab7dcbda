"""Pods: their set, load, probes and readiness."""
