"""The decoder, its weights and adapters."""
