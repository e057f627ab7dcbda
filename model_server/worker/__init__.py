"""Execution of the model: executor, workers of a tensor-parallel group, sampler."""
