#!/usr/bin/env bash
# The OCR run in decoupled mode: old log-probs are recomputed with the training graph, and the weights and the
# rejection of old / rollout are applied once per batch. The clip band may then be narrower than the mismatch.
set -euo pipefail

flowgrpo-rc train \
    algorithm.rollout_correction.bypass_mode=False \
    algorithm.rollout_correction.rollout_is=sequence \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.rollout_rs_threshold="0.5_2.0" \
    actor.diffusion_loss.clip_ratio=1e-4 \
    trainer.experiment_name=ocr_decoupled \
    trainer.output_dir=outputs/ocr_decoupled \
    "$@"
