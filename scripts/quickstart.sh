#!/usr/bin/env bash
# PPO with the bundled tiny model, on a rank for each GPU or on 4 CPU ranks: installs, trains, ends with the curve, the run
# directory and a page to look at.
# Usage: scripts/quickstart.sh [key=value ...]      e.g. total_steps=20, run.seed=1, run.dir=runs/mine
set -euo pipefail
cd "$(dirname "$0")/.."

run_dir=runs/quickstart-$(date +%Y%m%d-%H%M%S)
for setting in "$@"; do
    case $setting in run.dir=*) run_dir=${setting#run.dir=} ;; esac
done

scripts/setup.sh
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
ranks=$(.venv/bin/python -c "import torch; print(torch.accelerator.device_count() or 4)")
.venv/bin/torchrun --standalone --nproc-per-node "$ranks" -m spmdflow.run algos/ppo.py algos/ppo.yaml "$@" "run.dir=$run_dir"
.venv/bin/python -m spmdflow.report "$run_dir"
.venv/bin/python -m spmdflow.view "$run_dir"
