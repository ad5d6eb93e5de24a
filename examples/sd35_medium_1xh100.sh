#!/usr/bin/env bash
# Stable Diffusion 3.5 medium on one card of 80 GB: bash examples/sd35_medium_1xh100.sh ocr bypass
set -euo pipefail

exec bash "$(dirname "$0")/calibrated_run.sh" \
    "sd35_medium_${1:?ocr or pickscore}_1xh100" "${2:?bypass, decoupled or auto}" "${@:3}"
