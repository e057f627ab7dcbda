"""Tokenizer of the packaged model `kvroute-tiny`, trained by `train.py`."""
