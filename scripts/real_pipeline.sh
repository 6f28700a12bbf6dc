#!/usr/bin/env bash
# The stages of RLHF with a real instruct model of 135 M parameters, a command each: sft -> reward_model -> ppo, and dpo
# from the same pairs; every stage starts from the model that the one before exported (docs/LAPTOP.md). Continues where
# it was interrupted.
# Usage: SPMDFLOW_DATA=DATA scripts/real_pipeline.sh [RUNS]      RUNS: folder of the four runs, runs/real_pipeline
#        RANKS=1 scripts/real_pipeline.sh                        ranks of each stage (default: 2)
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:-runs/real_pipeline}
ranks=${RANKS:-2}
model=${MODEL:-models/SmolLM2-135M-Instruct}

scripts/setup.sh
.venv/bin/python scripts/make_smollm2.py "$model"
.venv/bin/python scripts/make_dialogues.py "$SPMDFLOW_DATA/hh-rlhf" problems
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

stage() { # stage SCRIPT SETTINGS...: train with algos/SCRIPT_dialogues.yaml, in RUNS/SCRIPT
    local script=$1
    shift
    .venv/bin/spmdflow run -n "$ranks" "algos/$script.py" "algos/${script}_dialogues.yaml" "run.dir=$runs/$script" "$@"
}

stage sft "actor.model.path=$model"
stage reward_model "reward_model.model.path=$runs/sft/export/actor"
stage ppo "actor.model.path=$runs/sft/export/actor" "reward.model.path=$runs/reward_model/export/reward_model"
stage dpo "actor.model.path=$runs/sft/export/actor"
.venv/bin/spmdflow report "$runs/ppo" --samples
.venv/bin/spmdflow view "$runs/sft" "$runs/reward_model" "$runs/ppo" "$runs/dpo"
