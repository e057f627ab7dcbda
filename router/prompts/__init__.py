"""Parsing of request bodies and tokenization of prompts."""
