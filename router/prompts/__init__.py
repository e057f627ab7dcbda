"""Request body to token ids."""
