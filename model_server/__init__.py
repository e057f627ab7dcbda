"""Model server: torch engine with a paged KV cache and prefix caching, OpenAI API, and vLLM's KV events."""
