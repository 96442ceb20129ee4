"""Result rows on disk: atomic writes, tolerant loads, and the resume key.

One row per (kernel, workload, step), long format, one file per job. A file is written under a
temporary name and renamed, so a reader sees a whole file or none; nothing is ever overwritten in
place. Values that follow from others are not stored: `derive` computes them at load.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.derived import derive, workload_axes
from experiments.schema import (
    COLUMNS,
    SCHEMA,
    SCHEMA_VERSION,
    STATUSES,
    ResultsError,
    checked_row,
    to_table,
)

__all__ = [
    "COLUMNS",
    "SCHEMA",
    "SCHEMA_VERSION",
    "STATUSES",
    "ResultsError",
    "code_hash",
    "derive",
    "latest",
    "load_rows",
    "resume_key",
    "workload_axes",
    "write_rows",
]

log = logging.getLogger(__name__)

_REQUIRED = ("kernel", "workload", "status", "schema_version")
# The same measurement made again: what `latest` groups by where a row holds no resume key.
_HEADS = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "dtype")
_SAME = ["kernel", "kernel_config", "workload", "step", "model", *_HEADS, "timer", "cold_l2", "gpu"]


def write_rows(rows: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Write rows as one parquet file: under a temporary name first, then renamed.

    Args:
        rows: one mapping per row; absent columns become null, `kernel_config` may be a mapping.
        path: the file, ending in .parquet; it must not exist (history is never overwritten).

    Returns:
        The path written.

    Raises:
        ResultsError: no rows, a row that `checked_row` refuses, a value of the wrong type, a file
            that exists, or a folder that cannot be written.
    """
    path = Path(path)
    if path.suffix != ".parquet":
        raise ResultsError(f"a results file ends in .parquet, got {path.name!r}")
    if not rows:
        raise ResultsError(f"no rows to write to {path}")
    table = to_table([checked_row(row, index) for index, row in enumerate(rows)])
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            raise ResultsError(f"{path} exists and history is never overwritten; use a new run id")
        try:
            pq.write_table(table, temporary, compression="zstd")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ResultsError(
            f"cannot write results to {path.parent} ({error.strerror or error}); "
            "name another folder or make this one writable"
        ) from error
    return path


def _parquet_files(source: str | Path) -> Iterator[Path]:
    path = Path(source)
    if path.is_dir():
        yield from sorted(path.rglob("*.parquet"))
    elif path.is_file():
        yield path
    else:
        for match in sorted(glob.glob(str(source), recursive=True)):
            yield from _parquet_files(match)


def _read(file: Path) -> pa.Table:
    """One file as a table of SCHEMA, or ValueError with the reason."""
    try:
        table = pq.ParquetFile(file).read()
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"not a readable parquet file ({reason})") from error
    absent = [name for name in _REQUIRED if name not in table.column_names]
    if absent:
        raise ValueError(f"not a results file of this project (no column {', '.join(absent)})")
    versions = set(table.column("schema_version").to_pylist())
    if strange := [v for v in versions if not isinstance(v, int) or v > SCHEMA_VERSION]:
        raise ValueError(f"schema_version {strange[0]}, want at most {SCHEMA_VERSION}")
    columns = []
    for field in SCHEMA:
        if field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        try:
            columns.append(table.column(field.name).cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise ValueError(f"column {field.name} does not hold {field.type}") from error
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def load_rows(source: str | Path, strict: bool = False) -> pd.DataFrame:
    """All rows of a file, a folder (searched recursively) or a glob, in file-name order.

    Args:
        source: parquet file, folder or glob pattern.
        strict: raise on a corrupt or foreign parquet file; by default it is named in one warning
            line and skipped.

    Returns:
        A DataFrame with exactly the columns of SCHEMA; repeats are kept (see `latest`).

    Raises:
        ResultsError: nothing readable there, or a bad file with strict=True.
    """
    tables = []
    files = list(_parquet_files(source))
    for file in files:
        try:
            tables.append(_read(file))
        except ValueError as error:
            if strict:
                raise ResultsError(f"{file}: {error}; move it out of the results") from error
            log.warning("skipped %s: %s", file, error)
    if not tables:
        what = f"{len(files)} parquet file(s), none readable" if files else "no parquet file"
        raise ResultsError(
            f"{source}: {what}; run `python -m experiments.bench` first or name another folder"
        )
    frame: pd.DataFrame = pa.concat_tables(tables).to_pandas()
    return frame


def latest(df: pd.DataFrame) -> pd.DataFrame:
    """The newest row of each resume key (of each point where a row holds none), in load order."""
    points = df[_SAME].itertuples(index=False, name=None)
    keys = [
        str(point) if pd.isna(key) else str(key)
        for key, point in zip(df["resume_key"], points, strict=True)
    ]
    order = df["timestamp_utc"].fillna("").astype(str).argsort(kind="stable").to_numpy()
    is_newest = ~pd.Series(keys).iloc[order].duplicated(keep="last").to_numpy()
    kept: pd.DataFrame = df.iloc[sorted(order[is_newest])].reset_index(drop=True)
    return kept


@cache
def code_hash() -> str:
    """Hash of every .py source of the installed deft and baselines packages."""
    import baselines
    import deft

    digest = hashlib.sha256()
    for module in (deft, baselines):
        folder = Path(str(module.__file__)).parent
        sources = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
        for name in sorted(sources):
            digest.update(f"{folder.name}/{name}\0".encode())
            digest.update(sources[name].read_bytes())
    return digest.hexdigest()[:16]


def resume_key(
    *,
    kernel: str,
    kernel_config: str | Mapping[str, Any] | None,
    workload: str,
    step: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    page_size: int,
    timing: str | Mapping[str, Any],
    gpu: str | None,
    code_hash: str,
    device_model: str | None = None,
    model: str | None = None,
) -> str:
    """Hash that says "this very row was made already"; any argument that changes changes it.

    Args:
        kernel_config: the configuration as a mapping or as JSON; key order does not matter.
        timing: timer settings; key order does not matter.
        gpu: name of the measuring device, None on CPU.
        code_hash: see `code_hash()`.
        device_model: device that predictions are for, with its figures.
        model: name of the head layout; two models may have equal heads.
    """
    text = (
        kernel_config if isinstance(kernel_config, str) else json.dumps(dict(kernel_config or {}))
    )
    parts = [
        kernel,
        json.loads(text or "{}"),
        workload,
        int(step),
        [int(num_qo_heads), int(num_kv_heads), int(head_dim)],
        dtype,
        int(page_size),
        timing if isinstance(timing, str) else dict(timing),
        gpu,
        code_hash,
        device_model,
        model,
    ]
    canonical = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]
