#!/usr/bin/env bash
# torch and packages of its release, built for CPUs:  bash install_cpu_torch.sh VENV torch==X [torchvision==Y]
#
# Where the default index offers torch for CUDA, the builds for CPUs come from PyTorch's own index. That index is asked
# for these packages alone, and not at all where the default one offers a build for CPUs: it may be out of reach.
set -euo pipefail
folder=${1:?usage: install_cpu_torch.sh VENV torch==X [torchvision==Y]}
shift
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@" --quiet; }
pip install --dry-run --no-deps --report "$folder/torch.json" "$1"
if ! "$folder/bin/python" - "$folder/torch.json" <<'PYTHON'
import json
import sys

(torch,) = json.load(open(sys.argv[1]))["install"]
sys.exit(any(name.startswith(("nvidia", "cuda")) for name in torch["metadata"].get("requires_dist", [])))
PYTHON
then
  pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$@"
fi
pip install "$@" # what is missing still: these packages, or just what they need
