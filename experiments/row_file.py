"""RowFile: the growing parquet file of one job, whole at every moment.

Each write goes to a temporary name and is renamed over this job's own file, so that a job that is
killed leaves the rows of its last write, and a reader never sees half a file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from experiments.schema import ResultsError, checked_row, to_table

WRITE_EVERY_S = 1.0


class RowFile:
    """Rows of one job on disk.

    Args:
        path: the .parquet file; it must not exist, it appears with the first write.

    Raises:
        ResultsError: the file exists or its folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._written = 0
        self._last_write = 0.0
        if path.exists():
            raise ResultsError(f"{path} exists and history is never overwritten; use a new run id")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._temporary.touch()
            self._temporary.unlink()
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> ResultsError:
        return ResultsError(
            f"cannot write results to {self.path.parent} ({error.strerror or error}); "
            "set results_dir=FOLDER to one that can be written"
        )

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a row; written at once, or within WRITE_EVERY_S of the last write by a later call.

        Raises:
            ResultsError: a row that the schema refuses, or a full or lost disk.
        """
        self.rows.append(checked_row(row, len(self.rows)))
        if time.monotonic() - self._last_write >= WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Bring the file up to date with the rows.

        Raises:
            ResultsError: the folder can no longer be written.
        """
        if self._written == len(self.rows):
            return
        try:
            pq.write_table(to_table(self.rows), self._temporary, compression="zstd")
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        self._written, self._last_write = len(self.rows), time.monotonic()
