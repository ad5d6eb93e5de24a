#!/usr/bin/env bash
# The settings of verl-omni's quickstart of rollout correction, on Qwen-Image with 4 cards of 80 GB: bypass mode, sequence
# weights that are metrics there, rejection of steps far off, and the plain log-ratio. With BUNDLED=1 they train the
# bundled model on two CPU cores.
set -euo pipefail

train=(accelerate launch --num_processes 4 -m flowgrpo_rc.train +experiment=qwen_image_ocr_rollout_corr_4xh800)
if [ -n "${BUNDLED:-}" ]; then
    train=(flowgrpo-rc train actor.diffusion_loss.clip_ratio=1e-4)
fi
exec "${train[@]}" \
    algorithm.rollout_correction.bypass_mode=True \
    algorithm.rollout_correction.centered=False \
    algorithm.rollout_correction.rollout_is=sequence \
    algorithm.rollout_correction.rollout_rs=seq_mean_k1 \
    algorithm.rollout_correction.rollout_rs_threshold='"0.5_2.0"' \
    trainer.experiment_name=qwen_image_ocr_lora_rollout_corr \
    trainer.output_dir=outputs/qwen_image_ocr_lora_rollout_corr \
    "$@"
