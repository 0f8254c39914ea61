#!/usr/bin/env bash
# Trains a config once for each pair of staleness threshold and sync steps, one run after the other,
# and compares the runs. In wandb they are one group.
#
#   examples/sweep.sh my-run.yaml [a.b.c=value …]
#   THRESHOLDS="0 0.5 1" SYNC_STEPS="1 4" SWEEP=runs/sweep examples/sweep.sh my-run.yaml
#
# The same command again continues where an interrupted or failed sweep stopped.
set -euo pipefail
config=$1
shift
sweep=${SWEEP:-runs/sweep}
export WANDB_RUN_GROUP=${WANDB_RUN_GROUP:-${sweep##*/}}
runs=()
for threshold in ${THRESHOLDS:-0 0.5 1 2}; do
	for steps in ${SYNC_STEPS:-1 4}; do
		runs+=("$sweep/threshold-$threshold-sync-$steps")
		if ! grep -qs '"status": *"completed"' "${runs[-1]}/summary.json"; then
			async_opd run "$config" --staleness-threshold "$threshold" --sync-steps "$steps" \
				--run-dir "${runs[-1]}" --resume "$@"
		fi
	done
done
async_opd compare "${runs[@]}" --out "$sweep/compare.html"
