"""Prompts that engines build by a library instead of a chat template: gpt-oss and Mistral's own format."""
