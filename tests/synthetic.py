"""Made-up result rows for tests of results, summaries and figures: none of it was measured."""

from __future__ import annotations

from typing import Any

KERNELS = ("radix_attention", "flash_decoding", "deft_node", "deft_flatten")
_COST = {"radix_attention": 1.6, "flash_decoding": 1.0, "deft_node": 0.5, "deft_flatten": 0.25}


def synthetic_row(
    kernel: str, prefix: int = 1024, width: int = 16, suffix: int = 32, **changes: Any
) -> dict[str, Any]:
    """One few-shot row of an imaginary GPU; `changes` replaces columns."""
    tree_tokens = prefix + width * suffix
    is_shared = kernel.startswith("deft")
    tokens = tree_tokens if is_shared else width * (prefix + suffix)
    kv_unique = tree_tokens * 4096
    latency = _COST.get(kernel, 1.0) * (20 + 0.002 * width * prefix)
    row = {
        "kernel": kernel,
        "kernel_config": {"_target_": "deft.TreeAttention", "block_kv": 64},
        "path": "synthetic",
        "workload": f"few_shot_{prefix}_{width}_{suffix}",
        "step": 0,
        "status": "ok",
        "kv_layout": "shared",
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 1,
        "dtype": "float16",
        "num_qo": width,
        "num_nodes": width + 1,
        "num_tokens": tree_tokens,
        "sharing_factor": width * (prefix + suffix) / tree_tokens,
        "latency_us_p50": latency,
        "latency_us_p20": latency * 0.97,
        "latency_us_p80": latency * 1.05,
        "latency_samples_us": [latency * 0.97, latency, latency * 1.05],
        "timer": "graph",
        "cold_l2": True,
        "plan_us": 40.0 + width,
        "predicted_us": latency * 0.8,
        "predicted_for": "h200",
        "floor_us": 4.0 + kv_unique / 4.5e6,
        "kv_bytes": tokens * 4096,
        "kv_unique_bytes": kv_unique,
        "q_bytes": width * 8192,
        "out_bytes": width * 8192,
        "partial_bytes": width * 33000 if is_shared else 0,
        "mask_bytes": 8 * tree_tokens if kernel == "deft_flatten" else 0,
        "index_bytes": 4 * tokens,
        "logits_bytes": 0,
        "gpu": "Imaginary GPU",
        "timestamp_utc": "2026-01-01T00:00:00Z",
    }
    row["total_bytes"] = sum(
        row[f"{term}_bytes"] for term in ("kv", "q", "out", "partial", "mask", "index", "logits")
    )
    row["hbm_bytes"] = kv_unique + row["q_bytes"] + row["out_bytes"] + row["partial_bytes"]
    return {**row, **changes}


def counted(row: dict[str, Any]) -> dict[str, Any]:
    """The same row as a machine without a GPU would write it: counted and predicted only."""
    gone = [name for name in row if name.startswith("latency_")]
    return {
        **{name: value for name, value in row.items() if name not in gone},
        "status": "counted",
        "gpu": None,
        "timer": None,
        "cold_l2": None,
    }


def synthetic_sweep(
    prefixes: tuple[int, ...] = (1024, 4096, 16384),
    widths: tuple[int, ...] = (16, 64),
    kernels: tuple[str, ...] = KERNELS,
) -> list[dict[str, Any]]:
    """Rows of every kernel at every (prefix, width)."""
    return [synthetic_row(k, p, w) for p in prefixes for w in widths for k in kernels]
