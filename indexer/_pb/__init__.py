"""Generated from proto/kvroute/v1; do not edit."""
