#!/usr/bin/env bash
# The OCR run in bypass mode: the rollout's log-probs are the old ones, and rejection happens inside the loss.
# No recompute, so a step is cheaper; the PPO band must be wider than the mismatch of the bf16 rollout. This is what the
# demo does; here the keys are spelled out.
set -euo pipefail

flowgrpo-rc train \
    algorithm.rollout_correction.bypass_mode=True \
    algorithm.rollout_correction.rollout_rs=token_k1 \
    algorithm.rollout_correction.rollout_rs_threshold=auto:4 \
    actor.diffusion_loss.clip_ratio=1e-3 \
    trainer.experiment_name=ocr_bypass \
    trainer.output_dir=outputs/ocr_bypass \
    "$@"
