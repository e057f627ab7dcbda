"""Ports that gateways ask: Envoy's ext_proc and ext_authz, PickEndpoint, health, access logs."""
