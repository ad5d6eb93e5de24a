#!/usr/bin/env bash
# Training on several nodes, from the folder of the repository:
#   sbatch --nodes=2 --gpus-per-node=8 examples/slurm.sh --config-name sd35_medium_ocr trainer.max_time=84600 ...
# trainer.output_dir must be on a disk that all nodes share. trainer.max_time (seconds) ends the run with its state saved
# before --time does; the same sbatch command goes on from there, on another number of nodes too.
#SBATCH --job-name=flowgrpo_rc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=%x_%j.log
set -euo pipefail

export CONFIG="${CONFIG:-configs/accelerate/fsdp2_multi_node.yaml}"
MAIN_IP="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MAIN_IP
export MAIN_PORT="$((20000 + SLURM_JOB_ID % 10000))"
export NUM_PROCESSES="$((SLURM_NNODES * SLURM_GPUS_ON_NODE))"

# One launcher to a node; when one fails, Slurm ends the others.
# shellcheck disable=SC2016  # the variables are those of each task
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file "$CONFIG" \
        --num_machines "$SLURM_NNODES" --num_processes "$NUM_PROCESSES" --machine_rank "$SLURM_NODEID" \
        --main_process_ip "$MAIN_IP" --main_process_port "$MAIN_PORT" \
        -m flowgrpo_rc.train "$@"
' launch "$@"
