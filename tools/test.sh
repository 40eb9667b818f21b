#!/usr/bin/env bash
# Set up everything and run the whole test suite: lint, types, tests. Extra arguments go to pytest.
#   tools/test.sh              all but the tests marked slow
#   tools/test.sh -m slow      those
#   tools/test.sh tests/unit   a part
# Needs Python 3.10 or later and a package registry. As root (or with CI=true) it also installs and starts
# the real HTTP and S3 servers of tools/services; otherwise their tests say why they are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup.sh dev
if [[ ${CI:-} == true || $(id -u) -eq 0 ]]; then
  tools/services/install.sh
fi

.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
# One thread per process for torch's small operations: many processes run side by side here.
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest "$@"
