"""Every shipped tile compiles for sm_80, sm_90 and sm_100 without a GPU, and its shared memory
fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Most dynamic shared memory one thread block may use (CUDA C++ Programming Guide, compute
# capabilities).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.parametrize("capability", SHARED_LIMIT)
def test_every_tile_compiles_and_fits(capability, tmp_path):
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(ROOT / "tests" / "compile_kernels.py"), str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])
    partial = [row for row in rows if row["kernel"] == "partial"]
    assert len(partial) >= 15 and len(rows) - len(partial) == 2
    for row in rows:
        assert row["shared"] <= SHARED_LIMIT[capability], row
    if capability == 90:  # 64 rows and four warps are one warp group: Hopper's own matmul is used
        big = [r for r in partial if r["block_m"] == 64 and r["dtype"] != "float32"]
        assert big and all(row["wgmma"] for row in big)
