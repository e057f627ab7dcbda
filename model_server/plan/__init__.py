"""What a model needs of GPUs, and what they can give: memory, concurrency and speed, before anything runs.

Plain arithmetic over a model's shape; no torch, so that it runs wherever kvroute is installed.
"""

from model_server.plan.deployment import Deployment
from model_server.plan.gpus import GPUS, Gpu
from model_server.plan.plan import Budget, Plan, Pool, make_plan, sequences_in
from model_server.plan.presets import PRESETS, find_model

__all__ = [
    "GPUS",
    "PRESETS",
    "Budget",
    "Deployment",
    "Gpu",
    "Plan",
    "Pool",
    "find_model",
    "make_plan",
    "sequences_in",
]
