#!/usr/bin/env bash
# FLUX.1-dev on 8 cards of 80 GB: bash examples/flux1_dev_8xh100.sh pickscore bypass
# Idle text encoders wait on the CPU, since calibrating needs the place of three transformers.
set -euo pipefail

exec bash "$(dirname "$0")/calibrated_run.sh" \
    "flux1_dev_${1:?ocr or pickscore}_8xh100" "${2:?bypass, decoupled or auto}" model.offload_idle=true "${@:3}"
