#!/usr/bin/env bash
# Stable Diffusion 3.5 medium on 8 cards of 80 GB: bash examples/sd35_medium_8xh100.sh pickscore decoupled
set -euo pipefail

exec bash "$(dirname "$0")/calibrated_run.sh" \
    "sd35_medium_${1:?ocr or pickscore}_8xh100" "${2:?bypass, decoupled or auto}" "${@:3}"
