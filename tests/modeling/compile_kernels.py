"""Compiles the Triton kernels for two generations of GPUs, and prints the shared memory that each of them takes."""

import json

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cskv_cli.modeling import cskv_triton


def compiled(kernel, target, pointers, **constants):
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    return triton.compile(
        ASTSource(kernel, types, constexprs=constants), target=GPUTarget("cuda", target, 32), options={"num_warps": 8}
    ).metadata


def main() -> None:
    shared, model = {}, "*bf16"
    for target in (80, 90):
        for bits in (0, 3):
            codes = {"codes": "*u8" if bits else model, "minimum": model, "step": model}
            types = {"scores": "*fp32", **dict.fromkeys(("query", "up", "bias", "turn"), model), **codes}
            blocks = dict(BLOCK_QUERIES=16, BLOCK_DIM=128, BLOCK_TOKENS=128, BLOCK_RANK=32)
            constants = dict(DIM=96, ROTATES=True, BIAS=True, BITS=bits, GROUP=32, **blocks)
            shared[f"keys {target} {bits}"] = compiled(cskv_triton._key_scores, target, types, **constants).shared
            if bits:
                types = {"sums": "*fp32", "weights": model, **codes}
                blocks = dict(BLOCK_HEADS=64, BLOCK_RANK=64, BLOCK_TOKENS=64)
                constants = dict(DTYPE=tl.bfloat16, BITS=bits, GROUP=32, **blocks)
                shared[f"values {target} {bits}"] = compiled(
                    cskv_triton._weighted_sum, target, types, **constants
                ).shared
    print(json.dumps(shared))


if __name__ == "__main__":
    main()
