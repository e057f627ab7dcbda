"""Decoder, weights, LoRA adapters and tensor parallel communication."""
