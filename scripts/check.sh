#!/usr/bin/env bash
# The one check before a commit, and the whole CI on a CPU: format, lint, types, tests.
# Usage: scripts/check.sh [arguments for pytest]      e.g. scripts/check.sh tests/weights -x -n 0
# PYTHON names the interpreter; default: .venv/bin/python if there is one, else python.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # two test processes share two cores better than their threads do
unset PYTHONDONTWRITEBYTECODE # else each worker, and each process that a test starts, compiles all modules again

"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
"$PYTHON" -m pytest -n 2 "$@"
