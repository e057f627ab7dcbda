"""Compiles the Triton kernels for GPUs that need not be there, and prints what the assembler reports as JSON.

Run as a program of its own: the tests of the kernels' results run them in Triton's interpreter, and a process
has either that or the compiler.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model_server.attention.gpu_kernel import attend, elementwise, rotate_store

GROUP, KV_HEADS, BLOCK = 4, 8, 16
_POINTERS = re.compile("_ptr$")
_KINDS = {"scale": "fp32", "epsilon": "fp32", "offset": "fp32"}


def variants(dims: Sequence[int]) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, int], bool]]:
    """Yield name, kernel, constants, compiler options and whether the pool is in 8 bits, for head sizes."""
    for dim in dims:
        pool = {"KV_HEADS": KV_HEADS, "GROUP": GROUP, "DIM": dim, "PAD": dim, "BLOCK": BLOCK}
        rows, lanes = attend.prefill_tile(GROUP)
        for fp8 in (False, True):
            for window in (False, True):
                name = f"{dim}{' fp8' * fp8}{' window' * window}"
                flags = {"FP8": fp8, "WINDOW": window}
                options = attend.prefill_options(dim, 1 if window else None, torch.bfloat16)
                constants = pool | flags | {"ROWS": rows, "LANES": lanes}
                yield f"prefill {name}", attend.attend_prefills, constants, options, fp8
                options = attend.decode_options(dim)
                constants = pool | flags | {"LANES": 16, "PARTS": 1 if window else 8}
                yield f"decode {name}", attend.attend_decodes, constants, options, fp8
            stored = {"HEADS": GROUP * KV_HEADS, "KV_HEADS": KV_HEADS, "DIM": dim, "PAD": dim // 2}
            for norms in (False, True):
                constants = stored | {
                    "BLOCK": BLOCK,
                    "ROWS": BLOCK,
                    "FP8": fp8,
                    "NORMS": norms,
                    "SINGLE": False,
                }
                name = f"store {dim}{' fp8' * fp8}{' norms' * norms}"
                yield name, rotate_store.rotate_and_store, constants, {}, fp8
    yield "add_rms_norm", elementwise.add_rms_norm, {"SIZE": 4096, "PAD": 4096}, {"num_warps": 8}, False
    yield "gate", elementwise.gate, {"SIZE": 14336, "COLUMNS": 1024, "GELU": False}, {}, False


def compiled(kernel: Any, constants: dict[str, Any], options: dict[str, int], fp8: bool, target: int) -> Any:
    """Compile one variant for compute capability `target` (90 for SM90)."""
    constants = constants | {key: value for key, value in options.items() if key == "TILE"}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("keys_ptr", "values_ptr") and fp8:
            signature[name] = "*fp8e4nv"
        elif name in ("starts_ptr", "contexts_ptr", "tables_ptr", "table_starts_ptr"):
            signature[name] = "*i32"
        elif name in ("key_scales_ptr", "value_scales_ptr", "parts_ptr", "logs_ptr"):
            signature[name] = "*fp32"
        else:
            signature[name] = "*bf16" if _POINTERS.search(name) else _KINDS.get(name, "i32")
    # As the launcher does for addresses and strides that are multiples of 16.
    aligned = [
        index
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*")
        or name in ("query_token", "query_head", "output_token", "kv_block", "kv_stride", "projected_token")
    ]
    source = ASTSource(
        kernel, signature, constants, {(index,): [["tt.divisibility", 16]] for index in aligned}
    )
    chosen = {key: value for key, value in options.items() if key != "TILE"}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=chosen)


def report(binary: Any) -> dict[str, int]:
    """Return shared memory, registers, spilled bytes and tensor-core instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack, local),) = re.findall(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    ptx = binary.asm["ptx"]
    return {
        "shared_bytes": binary.metadata.shared,
        "spilled_bytes": int(stack) + int(local),
        "registers": int(registers),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "tcgen05": ptx.count("tcgen05.mma"),
    }


def main(targets: list[str]) -> None:
    """Print, per target and variant, one line of JSON."""
    for target in targets:
        for name, kernel, constants, options, fp8 in variants((64, 128) if target == "90" else (128,)):
            if fp8 and int(target) < 89:  # no instructions for 8-bit floats
                continue
            found = report(compiled(kernel, constants, options, fp8, int(target)))
            print(json.dumps({"target": int(target), "variant": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
