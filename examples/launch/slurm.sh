#!/bin/bash
# A run on the machines of a Slurm job: sbatch examples/launch/slurm.sh run.yaml [OVERRIDES...]
# Each machine needs agentrl and your own modules, and all of them the folder of the run (run_dir) on a shared disk.
#SBATCH --job-name=agentrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# Two minutes before the end, the run gets SIGTERM. Queued again, it goes on from its last checkpoint.
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail

config=$1
shift
machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${machines%%$'\n'*}
address=$head:${RAY_PORT:-6379}

on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head")

"${on_head[@]}" ray start --head --port="${address##*:}" --block &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    srun --overlap --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks-per-node=1 --exclude="$head" \
        bash -c "until ray start --address=$address --block; do sleep 5; done" &
fi
# Devices are assigned once, when the run starts: wait for all machines.
"${on_head[@]}" python -c "
import time, ray
while True:
    try:
        ray.init('$address', log_to_driver=False)
        break
    except ConnectionError:
        time.sleep(2)
while len([node for node in ray.nodes() if node['Alive']]) < $SLURM_JOB_NUM_NODES:
    time.sleep(2)
"
"${on_head[@]}" agentrl train "$config" cluster=ray cluster.address="$address" "$@" --resume auto &
run=$! # srun, which hands signals on
trap 'kill -TERM $run' TERM
status=0
wait "$run" || status=$?
# The first wait ends with the signal, before the run has.
if kill -0 "$run" 2> /dev/null; then
    status=0
    wait "$run" || status=$?
fi
exit "$status"
