"""The columns of a result row, and the check that a row may be stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd
import pyarrow as pa

SCHEMA_VERSION = 1
STATUSES = ("ok", "counted", "incorrect", "unsupported", "oom", "error", "timeout")

_TEXT, _INT, _REAL, _BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
IO_TERMS = ("kv", "q", "out", "partial", "mask", "index", "logits")

# What was run and how it ended.
_IDENTITY = {
    "kernel": _TEXT,
    "kernel_config": _TEXT,  # sorted JSON
    "variant": _TEXT,  # knobs that a job's `variants` changed; null for the kernel's own file
    "path": _TEXT,  # which code path ran
    "workload": _TEXT,
    "step": _INT,
    "status": _TEXT,
    "status_detail": _TEXT,
    "kv_layout": _TEXT,  # shared | page_1_view | own_copy
    "model": _TEXT,
    "num_qo_heads": _INT,
    "num_kv_heads": _INT,
    "head_dim": _INT,
    "page_size": _INT,
    "dtype": _TEXT,
    "num_qo": _INT,
    "num_nodes": _INT,
    "num_tokens": _INT,
    "sharing_factor": _REAL,
}
# Microseconds and bytes of one layer's call.
_MEASURED = {
    **{f"latency_us_{name}": _REAL for name in ("p20", "p50", "p80", "ci_low", "ci_high")},
    "latency_samples_us": pa.list_(_REAL),
    "timer": _TEXT,
    "cold_l2": _BOOL,
    "plan_us": _REAL,
    "layout_us": _REAL,
    "layout_bytes": _INT,
    "plan_upload_bytes": _INT,
    "predicted_us": _REAL,
    "predicted_for": _TEXT,
    "floor_us": _REAL,
    **{f"{name}_bytes": _INT for name in (*IO_TERMS, "kv_unique", "total", "hbm")},
    "max_abs_err": _REAL,
    "row_rms_err": _REAL,
    "workspace_bytes": _INT,
}
_ENVIRONMENT = {
    "gpu": _TEXT,  # null or "cpu" where no GPU was used
    "num_sms": _INT,
    "driver": _TEXT,
    "sm_clock_mhz": _REAL,
    "throttle": _TEXT,
    "torch_version": _TEXT,
    "triton_version": _TEXT,
    "python_version": _TEXT,
    "commit": _TEXT,
    "dirty": _BOOL,
    "overrides": _TEXT,
    "seed": _INT,
    "ceiling_hbm_gb_s": _REAL,
    "ceiling_l2_gb_s": _REAL,
    "ceiling_l2_bytes": _INT,
    "ceiling_matmul_tflop_s": _REAL,
    "ceiling_launch_us": _REAL,
    "ceiling_source": _TEXT,  # measured, or the name of the device model
    "code_hash": _TEXT,
    "resume_key": _TEXT,
    "schema_version": _INT,
    "run_id": _TEXT,
    "timestamp_utc": _TEXT,  # ISO 8601
    "repro_command": _TEXT,
}
SCHEMA = pa.schema(list({**_IDENTITY, **_MEASURED, **_ENVIRONMENT}.items()))
COLUMNS = tuple(SCHEMA.names)


class ResultsError(ValueError):
    """A row, file or folder of results that cannot be used, with what to do about it."""


def checked_row(row: Mapping[str, Any], index: int = 0) -> dict[str, Any]:
    """One row with every column present, refusing what would make a table lie.

    Args:
        row: column -> value; absent columns become null, a mapping or list in a text column
            becomes sorted JSON.
        index: place of the row, for messages.

    Raises:
        ResultsError: an unknown column or status, no kernel or workload, or a latency on a row
            whose status is not ok.
    """
    unknown = sorted(set(row) - set(COLUMNS))
    if unknown:
        raise ResultsError(f"row {index} has unknown columns {unknown}; see experiments/schema.py")
    missing = [name for name in ("kernel", "workload", "status") if row.get(name) is None]
    if missing:
        raise ResultsError(f"row {index} lacks {missing}")
    status, latency = row["status"], row.get("latency_us_p50")
    if status not in STATUSES:
        raise ResultsError(f"row {index} has status {status!r}, want one of {STATUSES}")
    if status != "ok" and latency is not None and not pd.isna(latency):
        raise ResultsError(f"row {index} is {status!r} and has a latency; only an ok row may")
    out = {name: row.get(name) for name in COLUMNS}
    for name, value in out.items():
        if SCHEMA.field(name).type != _TEXT or value is None or isinstance(value, str):
            continue
        structured = isinstance(value, (Mapping, list, tuple))
        out[name] = json.dumps(value, sort_keys=True) if structured else str(value)
    out["step"] = 0 if out["step"] is None else out["step"]
    out["schema_version"] = SCHEMA_VERSION
    return out


def to_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Checked rows as an Arrow table of SCHEMA; NaN becomes null.

    Raises:
        ResultsError: a value of another type than its column's, naming the column.
    """
    arrays = []
    for field in SCHEMA:
        values = [row[field.name] for row in rows]
        try:
            arrays.append(pa.array(values, type=field.type, from_pandas=True))
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            raise ResultsError(f"column {field.name!r} wants {field.type}: {error}") from error
    return pa.Table.from_arrays(arrays, schema=SCHEMA)
