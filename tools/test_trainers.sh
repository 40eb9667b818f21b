#!/usr/bin/env bash
# The real trainers as judges: make .venv-trainers, install SpecForge, speculators and Model-Optimizer beside
# hsstream, and run tests/trainers in it. Extra arguments go to pytest.
# Needs Python 3.11 or later, a package registry and about 2 GB; no accelerator. Run again, it only checks.
set -euo pipefail
cd "$(dirname "$0")/.."
constraints=tools/trainers-constraints.txt

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "test_trainers.sh: Python 3.11 or later is needed, $("$python" --version) found; set PYTHON=..." >&2
  exit 1
}
[[ -x .venv-trainers/bin/python ]] || "$python" -m venv .venv-trainers
stamp=.venv-trainers/.hsstream
if [[ ! -e $stamp || pyproject.toml -nt $stamp || $constraints -nt $stamp || tools/constraints.txt -nt $stamp ]]; then
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  pip() { .venv-trainers/bin/python -m pip install --quiet -c "$constraints" "$@"; }
  # What the trainers import on a CPU; what they declare beside it is servers and kernels.
  pip torch numpy transformers datasets accelerate safetensors openai pydantic-settings loguru httpx aiohttp \
    psutil requests omegaconf regex nvidia-ml-py pulp scipy rich typer
  pip --no-deps speculators hs_connectors specforge nvidia-modelopt
  pip -e ".[fast,models,import]" pytest pytest-timeout
  touch "$stamp"
fi

export HSSTREAM_TRAINERS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
# Their warnings are theirs.
exec .venv-trainers/bin/python -m pytest -W default tests/trainers "$@"
