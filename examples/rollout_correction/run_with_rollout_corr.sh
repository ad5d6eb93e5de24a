#!/usr/bin/env bash
# The settings that the usage guide of verl starts with, truncated weights of each token in decoupled mode, on a language
# model of yours with vLLM rollouts: give model.path, data and reward. With BUNDLED=1 they train the bundled model on sums,
# on two CPU cores.
set -euo pipefail

train=(flowgrpo-rc train --config-name token_grpo)
if [ -z "${BUNDLED:-}" ]; then
    train+=(rollout.name=vllm_engine model.dtype=bf16 rollout.prompt_length=1024 rollout.response_length=1024)
fi
exec "${train[@]}" \
    algorithm.rollout_correction.bypass_mode=False \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    algorithm.rollout_correction.rollout_rs=null \
    trainer.experiment_name=rollout_corr \
    trainer.output_dir=outputs/rollout_corr \
    "$@"
