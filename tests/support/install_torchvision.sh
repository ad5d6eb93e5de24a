#!/usr/bin/env bash
# The torchvision of a folder's torch, without another torch:  bash install_torchvision.sh VENV
#
# The torchvision on PyPI is built for CUDA: beside a torch for CPUs its operators do not load, and its import fails where
# it describes them. Nothing here calls one, so it is enough to declare the two.
set -euo pipefail
folder=${1:?usage: install_torchvision.sh VENV}
python="$folder/bin/python"
release=$("$python" -c "from importlib.metadata import version; print(int(version('torch').split('.')[1]) + 15)")
"$python" -m pip --disable-pip-version-check install --quiet --no-deps "torchvision==0.$release.*"
if ! "$python" -c "import torchvision" 2> /dev/null; then
  cat >> "$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/torchvision/extension.py" <<'PYTHON'

_declared = torch.library.Library("torchvision", "DEF")
_declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
PYTHON
fi
