"""Request to pod: candidates, flow control, cost, order, decision."""
