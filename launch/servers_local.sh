#!/usr/bin/env bash
# Generation servers on one machine, one per GPU (or COUNT on a CPU), for runs on any machine that reaches it.
# Usage: launch/servers_local.sh MODEL_FOLDER [words for spmdflow serve]
# Ends all servers with Ctrl-C. Prints the words that a run needs.
set -euo pipefail

# Number of servers, each on the GPU of its number.
COUNT=${COUNT:-1}
# Address on which they listen: one that the run's ranks reach.
HOST=${HOST:-127.0.0.1}
# Port of the first one; the others follow.
PORT=${PORT:-8000}
# File with the key that every request must carry. It is made if it is missing.
KEY_FILE=${KEY_FILE:-server.key}
# Threads of one server on a CPU.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -s "$KEY_FILE" ]; then
    (umask 077 && openssl rand -hex 32 >"$KEY_FILE")
fi
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
ADDRESSES=
for INDEX in $(seq 0 $((COUNT - 1))); do
    CUDA_VISIBLE_DEVICES=$INDEX spmdflow serve "$1" --host "$HOST" --port $((PORT + INDEX)) --key-file "$KEY_FILE" "${@:2}" &
    ADDRESSES=$ADDRESSES${ADDRESSES:+,}http://$HOST:$((PORT + INDEX))
done
echo "actor.rollout.engine=served actor.rollout.server.key_file=$PWD/$KEY_FILE actor.rollout.server.addresses=[$ADDRESSES]"
wait
