#!/usr/bin/env bash
# Make .venv with everything the CPU needs: pinned packages (constraints.txt) and this project, editable.
# Usage: scripts/setup.sh        PYTHON=/path/to/python3 chooses the interpreter (3.11 or newer)
# Runs once; as long as the four files below do not change, a second run does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/setup.stamp
wanted=$(cat constraints.txt setup.cfg pyproject.toml scripts/setup.sh | cksum)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

usable() { "$1" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
if [ ! -x .venv/bin/python ]; then
    for python in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
        if usable "$python"; then break; fi
        python=
    done
    if [ -z "$python" ]; then
        echo "setup: no Python >= 3.11 with venv found (tried ${PYTHON:-python3.11, python3, python3.12, python3.13}); set PYTHON=/path/to/python3" >&2
        exit 1
    fi
    echo "setup: making .venv with $($python --version); takes some minutes, once" >&2
    "$python" -m venv .venv
fi

install() { .venv/bin/python -m pip install -qq --no-input --disable-pip-version-check --no-deps "$@"; }
torch=$(grep '^torch==' constraints.txt)
# A CPU wheel from pip's own configuration (find-links) if there is one, else from PyTorch's CPU index.
install "$torch+cpu" 2>/dev/null || install --index-url https://download.pytorch.org/whl/cpu "$torch"
install -r constraints.txt
install --no-build-isolation -e .
printf '%s\n' "$wanted" >"$stamp"
