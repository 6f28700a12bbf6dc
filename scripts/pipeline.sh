#!/usr/bin/env bash
# The stages of RLHF on real input, a command each: sft -> reward_model -> ppo; every stage starts
# from the model that the one before exported. Continues where it was interrupted.
# Usage: SPMDFLOW_DATA=DATA scripts/pipeline.sh [RUNS]      RUNS: folder of the three runs, runs/pipeline
#        RANKS=2 scripts/pipeline.sh                        ranks of each stage (default: 1, without torchrun)
set -euo pipefail
cd "$(dirname "$0")/.."

runs=${1:-runs/pipeline}
ranks=${RANKS:-1}
python=${PYTHON:-.venv/bin/python}
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=$PWD

stage() {
    if [ "$ranks" = 1 ]; then
        "$python" -m spmdflow.run --inproc "$@"
    else
        "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" -m spmdflow.run "$@"
    fi
}

[ -f runs/story_pairs/pairs.test.jsonl ] || "$python" scripts/make_story_pairs.py

stage algos/sft.py algos/sft_stories.yaml "run.dir=$runs/sft"

stage algos/reward_model.py algos/reward_model_stories.yaml "run.dir=$runs/reward_model" \
    "reward_model.model.path=$runs/sft/export/actor"

stage algos/ppo.py algos/ppo_stories.yaml "run.dir=$runs/ppo" total_steps=12 eval_every=4 save_every=4 \
    "actor.model.path=$runs/sft/export/actor" \
    "reward.model.path=$runs/reward_model/export/reward_model"

"$python" scripts/pair_accuracy.py --model "$runs/reward_model/export/reward_model"
mkdir -p "$runs/judged"
ln -sfn ../sft/export/actor "$runs/judged/sft"
ln -sfn ../ppo/export/actor "$runs/judged/ppo"
"$python" scripts/stories_metrics.py --no-start --draws 1 --model "$runs/judged/sft" --model "$runs/judged/ppo" \
    --json "$runs/judged.json"
