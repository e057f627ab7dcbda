"""Services that gateways ask: ext_proc, ext_authz, PickEndpoint, health, access logs."""
