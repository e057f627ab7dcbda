"""Model dimensions read from a Hugging Face config.json, without torch."""
