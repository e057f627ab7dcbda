"""Requests of the APIs that chat prompts come by: chat completions, Anthropic messages, responses."""
