"""gRPC services that gateways call: ext_proc, ext_authz, PickEndpoint, health, access logs."""
