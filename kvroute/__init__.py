"""The `kvroute` command, and the local stack of model servers, router and Envoy processes."""
