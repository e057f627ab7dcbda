"""Published bytes to events."""
