#!/usr/bin/env bash
# Format, lint, types and the house rules (tests/policy): what every change must pass before it is pushed.
# Usage: scripts/check.sh      to mend the first two: .venv/bin/ruff format . && .venv/bin/ruff check --fix .
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/setup.sh
export RUFF_OUTPUT_FORMAT=concise
.venv/bin/ruff format --check --quiet .
.venv/bin/ruff check --quiet .
.venv/bin/mypy --no-error-summary spmdflow
scripts/test.sh --quiet tests/policy
