"""The router program: flags, wiring of the parts, listeners, debug pages."""
