#!/usr/bin/env bash
# Two rewards at once on the bundled model, OCR and CLIP: their curves stand apart in the report.
set -euo pipefail

flowgrpo-rc train --config-name tiny_clip_ocr \
    trainer.experiment_name=ocr_and_clip \
    trainer.output_dir=outputs/ocr_and_clip \
    "$@"
