"""The laptop stack: model servers, the router and a real Envoy as one supervised process tree."""
