"""Compiles Triton kernels for GPUs that need not be there, and prints what came out as JSON.

    python tests/compile_kernels.py CAPABILITY [CAPABILITY ...]      e.g. 80 90 100

Run in a process without TRITON_INTERPRET (tests/test_compile.py does). Every tile that
default_tiles, pat or deft_paper ships is compiled for the head layouts that choose it, and both
forms of the merge.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deft.kernels.merge import _merge_kernel
from deft.kernels.partial import _partial_attention_kernel
from deft.planners.flatten import paper_tile
from deft.planners.pat import pat_tiles
from deft.planners.tiles import default_tiles
from deft.shape import HeadShape

POINTER = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}
SHAPES = (
    HeadShape(4, 4, 128),
    HeadShape(32, 8, 128),
    HeadShape(32, 8, 80, "bfloat16"),
    HeadShape(7, 1, 256),
    HeadShape(8, 2, 128, "float32"),
)


def compile_one(kernel, types, constants, capability, num_warps, num_stages):
    """(shared memory bytes, PTX) of one kernel."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    divisible = [["tt.divisibility", 16]]
    attrs = {
        (i,): divisible
        for i, name in enumerate(names)
        if name.endswith("_ptr") or name.startswith("stride")
    }
    indices = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, indices, attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return binary.metadata.shared, binary.asm["ptx"]


def partial_types(pointer):
    ints = ("item_meta", "item_query", "item_dest", "chunk_base", "chunk_len", "token_slot")
    return {
        **{f"{name}_ptr": pointer for name in ("q", "k", "v", "o", "partial_o")},
        **{f"{name}_ptr": "*fp32" for name in ("lse", "partial_lse")},
        **{f"{name}_ptr": "*i32" for name in ints},
        "token_mask_ptr": "*i64",
        "first_item": "i32",
        "qk_scale": "fp32",
        **{f"stride_{name}": "i32" for name in ("qm", "qh", "kn", "kh", "om", "oh")},
    }


def partial_constants(shape, tile, words):
    return {
        "NUM_HEADS": tile.ctas_per_item(shape),
        "NUM_QO_HEADS": shape.num_qo_heads,
        "GROUP_SIZE": shape.group_size,
        "PACK_GROUP": tile.pack_group,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(shape.head_dim)),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "NUM_WORDS": words,
        "WRITE_LSE": True,
        "NUM_STAGES": tile.num_stages,
        "INPUT_PRECISION": "ieee",
    }


def merge_types(pointer):
    return {
        **{f"{name}_ptr": pointer for name in ("partial_o", "o")},
        **{f"{name}_ptr": "*fp32" for name in ("partial_lse", "lse")},
        **{f"merge_{name}_ptr": "*i32" for name in ("query", "indptr")},
        **{f"stride_{name}": "i32" for name in ("om", "oh")},
    }


def main(capabilities):
    rows = []
    for capability in capabilities:
        for shape in SHAPES:
            pointer = POINTER[shape.dtype]
            tiles = {
                *default_tiles(shape),
                *default_tiles(shape, long_runs=True),
                *pat_tiles(shape),
                paper_tile(shape),
            }
            for tile in sorted(tiles, key=repr):
                words = 2 if tile.queries_per_item(shape.group_size) > 64 else 1
                shared, ptx = compile_one(
                    _partial_attention_kernel,
                    partial_types(pointer),
                    partial_constants(shape, tile, words),
                    capability,
                    tile.num_warps,
                    tile.num_stages,
                )
                rows.append(
                    {
                        "kernel": "partial",
                        "capability": capability,
                        "shape": repr(shape),
                        "block_m": tile.block_m,
                        "dtype": shape.dtype,
                        "num_warps": tile.num_warps,
                        "shared": shared,
                        "wgmma": "wgmma" in ptx,
                    }
                )
        for block_s in (4, 16):
            constants = {"NUM_QO_HEADS": 32, "HEAD_DIM": 96, "BLOCK_D": 128, "BLOCK_S": block_s}
            constants["WRITE_LSE"] = True
            shared, _ = compile_one(
                _merge_kernel, merge_types("*fp16"), constants, capability, 1, 3
            )
            rows.append({"kernel": "merge", "capability": capability, "shared": shared})
    print(json.dumps(rows))


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
