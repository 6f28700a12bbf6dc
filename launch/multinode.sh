#!/usr/bin/env bash
# Several machines without a scheduler: start the same line on every machine.
# Usage: NODES=2 FIRST_NODE=host0 launch/multinode.sh SCRIPT [CONFIG.yaml] [key=value ...]
set -euo pipefail

# Machines that take part; torchrun waits for all of them.
NODES=${NODES:-2}
# Processes on each machine: one per GPU, or as many CPU ranks as you like.
RANKS=${RANKS:-4}
# Machine that every other one can reach by this name or address.
FIRST_NODE=${FIRST_NODE:-127.0.0.1}
# Free port on that machine.
PORT=${PORT:-29400}
# Any name, the same on all machines; two jobs on one port need different ones.
JOB=${JOB:-spmdflow}
# Name or address under which the others reach this machine; needed if its host name is unknown to them.
ADDRESS=${ADDRESS:-$(hostname)}
# Network interface between the machines, such as eth0; needed where a machine takes its own name for a
# loopback address (127.0.1.1 in /etc/hosts, as Debian has it).
INTERFACE=${INTERFACE:-}
[ -z "$INTERFACE" ] || export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
# Threads of one rank; more than cores / ranks slows every rank down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Seconds that a run which is asked to stop (Ctrl-C, SIGTERM) has for its step and a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
# Restarts after a failure before torchrun gives up; with run.resume=auto each goes on from the checkpoint.
RESTARTS=${RESTARTS:-3}

RENDEZVOUS=(--rdzv-backend c10d --rdzv-endpoint "$FIRST_NODE:$PORT" --rdzv-id "$JOB" --local-addr "$ADDRESS")
torchrun --nnodes "$NODES" --nproc-per-node "$RANKS" --max-restarts "$RESTARTS" "${RENDEZVOUS[@]}" -m spmdflow.run "$@"
