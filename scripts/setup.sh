#!/usr/bin/env bash
# Makes the virtual environment. A torch that is already installed for this Python is used as it is; otherwise the CPU build of
# 2.13.0 is installed first, because a plain "torch" would bring
# gigabytes of CUDA libraries where pip prefers that build (TORCH=... chooses another; PIP_INDEX_URL is respected).
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" - <<'CHECK' || { echo "outrider needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
import sys
sys.exit(sys.version_info < (3, 11))
CHECK

echo "setting up $VENV (once)"
flags=""
if "$PYTHON" -c 'import torch' 2>/dev/null; then flags="--system-site-packages"; fi
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv $flags "$VENV"
pip="$VENV/bin/python -m pip --disable-pip-version-check --quiet"
if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null; then
  $pip install "${TORCH:-torch==2.13.0}"
fi
$pip install -e ".[dev,serve]"
touch "$VENV/.ready"
