#!/usr/bin/env bash
# Training on several nodes, from the folder of the repository, in as many jobs as it takes:
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 examples/slurm.sh +experiment=sd35_medium_ocr_16xh100 \
#       trainer.strategy=fsdp2 trainer.output_dir=/shared/run ...
# One task is one process with one GPU, and sees all GPUs of its node. All nodes must see trainer.output_dir. Ten minutes before --time is over, Slurm
# sends SIGUSR1 to the tasks: they finish their step, save and end with exit code 75, and the job goes back into the
# queue, from where it goes on. So a step with its evaluation and checkpoint has to take less than that (--signal).
#SBATCH --job-name=flowgrpo_rc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@600
#SBATCH --requeue
#SBATCH --output=%x_%j.log
#SBATCH --open-mode=append
set -euo pipefail

MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER_ADDR
export MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"
export WORLD_SIZE="$SLURM_NTASKS"
export LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Processes meet over gloo once a step, which would take the address that the hostname has, often 127.0.1.1.
if [ -n "${NCCL_SOCKET_IFNAME:-}" ]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$NCCL_SOCKET_IFNAME}"
fi

# No launcher stands between Slurm and a process, or it would take the signal and hide the exit code. If a task ends,
# the others have five minutes to end, too.
code=0
# shellcheck disable=SC2016  # the variables are those of each task
srun --wait=300 bash -c '
    export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"
    exec python -m flowgrpo_rc.train "$@"
' task "$@" || code=$?
if [ "$code" -eq 75 ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
