#!/usr/bin/env bash
# Measures how an experiment's engine and trainer differ, then trains with the settings that fit:
#   bash examples/calibrated_run.sh EXPERIMENT MODE [overrides]
# EXPERIMENT is a file of configs/experiment that ends in its cards, all of this machine, MODE is bypass, decoupled, or auto
# for what the measurement says. What was measured once is used again, so that the same command goes on with a run;
# CALIBRATION names the folder of another measurement. From the folder of the repository, with dataset/ in it.
set -euo pipefail

experiment=$1 mode=$2
shift 2
cards=${experiment##*_}
cards=${cards%%x*}
calibration=${CALIBRATION:-outputs/calibration/${experiment}_$mode}

if [ ! -e "$calibration/calibration/measured.yaml" ]; then
    flowgrpo-rc calibrate --out "$calibration" --mode "$mode" "+experiment=$experiment" "$@"
fi
train=(flowgrpo-rc train)
if [ "$cards" -gt 1 ]; then
    train=(accelerate launch --config_file configs/accelerate/ddp.yaml --num_processes "$cards" -m flowgrpo_rc.train)
fi
exec "${train[@]}" --config-dir "$calibration" "+experiment=$experiment" +calibration=measured \
    "trainer.output_dir=outputs/${experiment}_$mode" "trainer.experiment_name=${experiment}_$mode" "$@"
