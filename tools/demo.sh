#!/usr/bin/env bash
# From a fresh clone to a trained draft head: installs into .venv, then runs tools/demo.py.
#   tools/demo.sh           54,000 tokens of real text, a few minutes
#   tools/demo.sh --quick   10,000 tokens, about 90 seconds after the installation
#   tools/demo.sh --fresh   forget what earlier runs left in .cache/demo
# Needs Python 3.10 or later and a package registry; no account, no model hub.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ -x .venv/bin/python ]] || echo "installing into .venv: minutes the first time, torch is large ..."
tools/setup.sh fast,http,demo
HF_HUB_OFFLINE=1 TQDM_DISABLE=1 exec .venv/bin/python tools/demo.py "$@"
