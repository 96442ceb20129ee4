#!/usr/bin/env bash
# The committed reference run: scripts/device/reference_run.sh [RESULTS_DIR] [PRESET ...]
#
# On one GPU; 13 kernels took 5 minutes, and `dry_run=true` estimates a preset. A copy of the repository without its history names the commit in
# TREE_BENCH_COMMIT. Figures can be drawn elsewhere: python -m experiments.figures results=DIR/PRESET
set -euo pipefail
cd "$(dirname "$0")/../.."
results=${1:-results/h200}
shift || true
presets=("$@")
[ ${#presets[@]} -gt 0 ] || presets=(layered_suite prefix_length tree_size)
status=0
for preset in "${presets[@]}"; do
    "${PYTHON:-python3}" -m experiments.bench "+experiment=$preset" "results_dir=$results" figures=false || status=$?
done
exit "$status"
