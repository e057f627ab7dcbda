"""Endpoint selection: candidates, flow control, cost per pod, order, decision."""
