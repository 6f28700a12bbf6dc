#!/usr/bin/env bash
# Run every test marked slow, one process a file, and remember which files passed: run it again to go on where it stopped.
# Usage: scripts/slow.sh [--again] [FILE ...]     --again forgets what passed; FILE: only these test files
# The record is .slow/passed, a line a file with the commit and the seconds; a file counts only for the commit it passed on.
set -uo pipefail
cd "$(dirname "$0")/.."

mkdir -p .slow
[ "${1:-}" = --again ] && { rm -f .slow/passed; shift; }
touch .slow/passed
scripts/setup.sh || exit 1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
commit=$(git rev-parse --short HEAD)
git diff --quiet HEAD || commit=$commit-changed
files=("$@")
[ ${#files[@]} -gt 0 ] || mapfile -t files < <(grep -rl --include='test_*.py' 'mark\.slow' tests | sort)

failed=()
for file in "${files[@]}"; do
    if grep -q "^$commit $file " .slow/passed; then
        echo "slow: $file passed on $commit before"
        continue
    fi
    started=$SECONDS
    .venv/bin/python -m pytest -q -m slow --timeout 3600 "$file" 2>&1 | tee ".slow/$(basename "$file" .py).log" | tail -n 3
    if [ "${PIPESTATUS[0]}" -eq 0 ]; then
        echo "$commit $file $((SECONDS - started))s" >>.slow/passed
    else
        failed+=("$file")
    fi
done
[ ${#failed[@]} -eq 0 ] || { printf 'slow: failed: %s (see .slow/)\n' "${failed[*]}"; exit 1; }
echo "slow: all ${#files[@]} files passed on $commit"
