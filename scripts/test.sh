#!/usr/bin/env bash
# Run every test but those marked slow, gpu or drill, in a fresh clone too.
# Usage: scripts/test.sh [pytest args]      e.g. scripts/test.sh tests/unit -k config, scripts/test.sh -m "drill and not slow"
# Test files run two at a time, the longest first; TEST_WORKERS=0 runs them one by one, as a debugger needs.
# SPMDFLOW_DATA names the folder of real models and prompts; tests that need it skip without it.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
export PYTHONDONTWRITEBYTECODE= # without compiled files each process of a test compiles all of the package again
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m pytest -n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
