"""The number types that a model can compute in.

In: config.json and what the operator asked for. Out: a type's name, and its size. It knows no tensors.
"""

from model_server.config import DType
from model_server.shapes.hf_config import HfConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def computed_dtype(config: HfConfig, dtype: DType) -> str:
    """Return the type of weights and activations; "auto" takes what config.json names.

    Raises:
        ModelError: It names another one.
    """
    if dtype != "auto":
        return dtype
    named = config.text("dtype", config.text("torch_dtype", "float32"))
    if named not in DTYPE_BYTES:
        raise config.error("dtype", named, f"one of {', '.join(DTYPE_BYTES)} (or choose one by --dtype)")
    return named
