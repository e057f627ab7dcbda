"""Demonstration of a running stack: kvroute beside other policies on the same pods."""
