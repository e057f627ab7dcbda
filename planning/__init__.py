"""What a model needs of GPUs, and what they can give: memory, concurrency and speed, before anything runs.

Plain arithmetic over a model's shape; no torch, so that it runs wherever kvroute is installed.
"""
