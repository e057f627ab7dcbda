"""From a request to a pod: candidates, flow control, cost, order, decision."""
