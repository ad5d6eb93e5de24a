#!/usr/bin/env bash
# Qwen-Image, sampled by vLLM-Omni, on 4 cards of 141 GB: bash examples/qwen_image_4xh200.sh ocr decoupled
set -euo pipefail

exec bash "$(dirname "$0")/calibrated_run.sh" \
    "qwen_image_${1:?ocr or pickscore}_4xh200" "${2:?bypass, decoupled or auto}" "${@:3}"
