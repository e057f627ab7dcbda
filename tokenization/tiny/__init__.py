"""The tokenizer of the packaged model; `train.py` made it."""
