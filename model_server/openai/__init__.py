"""OpenAI-compatible HTTP API of the model server."""
