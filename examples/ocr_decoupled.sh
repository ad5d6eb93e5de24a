#!/usr/bin/env bash
# The OCR run in decoupled mode: old log-probs are those of the training graph, so that the clip band may be narrower than
# the mismatch; steps that went wrong are rejected. No weights: docs/evidence.md.
set -euo pipefail

flowgrpo-rc train \
    algorithm.rollout_correction.bypass_mode=False \
    algorithm.rollout_correction.rollout_rs=token_k1 \
    algorithm.rollout_correction.rollout_rs_threshold=auto:4 \
    actor.diffusion_loss.clip_ratio=1e-4 \
    trainer.experiment_name=ocr_decoupled \
    trainer.output_dir=outputs/ocr_decoupled \
    "$@"
