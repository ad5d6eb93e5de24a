#!/usr/bin/env bash
# Training on the first of several nodes and sampling on the others, from the folder of the repository, in as many jobs as
# it takes:
#   sbatch --nodes=3 --gpus-per-node=8 --cpus-per-task=64 examples/slurm_workers.sh +experiment=sd35_medium_ocr_8xh100 \
#       rollout.staleness=1 trainer.output_dir=/shared/run ...
# The first node trains with a process for each of its GPUs. Ray runs a rollout worker for each GPU of the other nodes. All
# nodes must see this environment and the model under the same paths. Ten minutes before --time is over, Slurm warns this
# file, which tells the trainer: it finishes its step, saves and ends with exit code 75, and the job goes back into the
# queue, from where it goes on. So a step with its evaluation and checkpoint has to take less than that (--signal).
#SBATCH --job-name=flowgrpo_rc
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --output=%x_%j.log
#SBATCH --open-mode=append
set -euo pipefail

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
ip="$(getent ahostsv4 "$first" | awk 'NR == 1 { print $1 }')"
address="$ip:$((20000 + SLURM_JOB_ID % 10000))"
others="$((SLURM_JOB_NUM_NODES - 1))"
gpus="${SLURM_GPUS_ON_NODE:-1}"

# Ray listens on all addresses of a node; who does not know the token is refused.
RAY_AUTH_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# shellcheck disable=SC2046  # one word for each process
trap 'kill $(jobs -p) 2> /dev/null || true; wait' EXIT
# Ray may use nothing of the first node, where the trainer is.
ray start --block --head --node-ip-address="$ip" --port="${address#*:}" --num-cpus=0 --num-gpus=0 \
    --include-dashboard=false &
srun --relative=1 --nodes="$others" --ntasks="$others" --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    ray start --block --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" &

timeout 600 python - "$address" "$SLURM_JOB_NUM_NODES" << 'PYTHON' || { echo "not all nodes have joined Ray" >&2; exit 1; }
import contextlib
import sys
import time

import ray

while not ray.is_initialized():
    with contextlib.suppress(ConnectionError):
        ray.init(sys.argv[1], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(1)
PYTHON

python -m flowgrpo_rc.train trainer.num_processes="$gpus" rollout.workers="$((others * gpus))" "$@" \
    rollout.ray_address="$address" &
trainer=$!
trap 'kill -USR1 "$trainer"' USR1
# The warning ends a wait, but not the trainer.
while kill -0 "$trainer" 2> /dev/null; do
    wait "$trainer" || true
done
code=0
wait "$trainer" || code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
exit "$code"
