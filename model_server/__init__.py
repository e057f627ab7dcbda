"""A torch engine with a paged, prefix-sharing KV cache behind OpenAI's API; publishes vLLM's KV events."""
