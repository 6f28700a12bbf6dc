#!/usr/bin/env bash
# One machine. Usage: launch/local.sh SCRIPT [CONFIG.yaml] [key=value ...]
set -euo pipefail

# Processes on this machine: one per GPU, or as many CPU ranks as you like.
RANKS=${RANKS:-4}
# Threads of one rank; more than cores / ranks slows every rank down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Seconds that a run which is asked to stop (Ctrl-C, SIGTERM) has for its step and a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
# Restarts after a failure before torchrun gives up; with run.resume=auto each goes on from the checkpoint.
RESTARTS=${RESTARTS:-0}

torchrun --standalone --nproc-per-node "$RANKS" --max-restarts "$RESTARTS" -m spmdflow.run "$@"
