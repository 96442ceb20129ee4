"""How well predicted latencies rank plans: against the committed rows of an H200.

    python scripts/prediction_regret.py [RESULTS_DIR]

Predicts every measured row that runs a plan of ours again, with the device model as it is now; no
GPU is needed. Prints, before (`predicted_us` as stored) and now, on how many points the plan with
the lowest prediction was the fastest, how much slower it was, and how predictions stand to
latencies.
"""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd

from deft.device_model import DeviceModel
from experiments.config import compose_job
from experiments.results import latest, load_rows

PRESETS = ("layered_suite", "prefix_length", "tree_size")
KERNELS = (
    *("cascade_own", "deft_flatten", "deft_node", "deft_node_chunk", "fasttree"),
    *("flash_decoding", "hydragen", "paged_attention", "pat"),
)
POINT = ["model", "workload"]


def predicted(folder: str, preset: str, device: DeviceModel) -> pd.DataFrame:
    """The measured rows of a preset with a column `now`."""
    rows = latest(load_rows(f"{folder}/{preset}"))
    rows = rows[rows["kernel"].isin(KERNELS) & (rows["status"] == "ok")]
    job = compose_job([f"+experiment={preset}", "variants=none", f"kernel=[{','.join(KERNELS)}]"])
    trees = {point.name: point.tree for point in job.workload.points()}
    kernels = {name: job.make_kernel(name) for name in KERNELS}
    now = [
        kernels[row.kernel].predict_us(
            trees[row.workload], job.shape(row.model, row.dtype), row.page_size, device
        )
        for row in rows.itertuples()
    ]
    return rows.assign(now=now)


def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else "results/h200"
    device = DeviceModel.load("h200")
    rows = pd.concat([predicted(folder, preset, device) for preset in PRESETS])
    for title, column in (("before", "predicted_us"), ("now", "now")):
        regret = np.array(
            [
                group.loc[group[column] == group[column].min(), "latency_us_p50"].iloc[0]
                / group["latency_us_p50"].min()
                for _, group in rows.reset_index(drop=True).groupby(POINT)
            ]
        )
        ratio = np.log(rows[column] / rows["latency_us_p50"])
        print(
            f"{title}: {len(rows)} rows, lowest prediction fastest on {(regret == 1).sum()} of "
            f"{len(regret)} points, {np.exp(np.log(regret).mean()):.3f} times the fastest in the "
            f"geometric mean, {regret.max():.2f} at worst; predicted / measured "
            f"{np.exp(ratio.mean()):.2f} ({np.exp(ratio.min()):.2f} to {np.exp(ratio.max()):.2f}), "
            f"std of the log {ratio.std():.2f}"
        )


if __name__ == "__main__":
    main()
