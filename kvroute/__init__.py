"""The `kvroute` command, and the local stack: model servers, the router and a real Envoy as processes."""
