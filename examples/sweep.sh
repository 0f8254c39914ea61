#!/usr/bin/env bash
# Trains a config once for each pair of staleness threshold and sync steps, one run after the other,
# and compares the runs. In wandb they are one group.
#
#   examples/sweep.sh my-run.yaml [a.b.c=value …]
#   THRESHOLDS="0 0.5 1" SYNC_STEPS="1 4" SWEEP=runs/my-sweep examples/sweep.sh my-run.yaml
#
# The same command again continues where an interrupted or failed sweep stopped.
set -euo pipefail
config=${1:?usage: examples/sweep.sh CONFIG [a.b.c=value …]}
name=${config##*/}
sweep=${SWEEP:-runs/sweep-${name%.*}}
export WANDB_RUN_GROUP=${WANDB_RUN_GROUP:-${sweep##*/}}
mkdir -p "$sweep"
if [[ -e $sweep/arguments && $(<"$sweep/arguments") != "$*" ]]; then
	echo "$sweep is a sweep of other arguments: $(<"$sweep/arguments") → set SWEEP to another folder" >&2
	exit 2
fi
echo "$*" >"$sweep/arguments"
shift
runs=()
for threshold in ${THRESHOLDS:-0 0.5 1 2}; do
	for steps in ${SYNC_STEPS:-1 4}; do
		runs+=("$sweep/threshold-$threshold-sync-$steps")
		if ! grep -qs '"status": *"completed"' "${runs[-1]}/summary.json"; then
			mkdir -p "${runs[-1]}"
			async_opd run "$config" --staleness-threshold "$threshold" --sync-steps "$steps" \
				--run-dir "${runs[-1]}" --resume "$@"
		fi
	done
done
async_opd compare "${runs[@]}" --out "$sweep/compare.html"
