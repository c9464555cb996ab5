#!/bin/bash
# Writes simulated.txt and planned.txt into the folder that is given: the same everywhere, nothing is timed.
set -euo pipefail

folder="${1:?usage: simulate.sh FOLDER}"
for ranks in 64 512 4096; do
    for sequences in 2 4 16; do
        mlbert plan --simulate-ranks "${ranks}" --batch-per-gpu "${sequences}"
    done
done >"${folder}/simulated.txt"
for network in 400Gb 100Gb 1Gb; do
    mlbert plan --gpu h100 --gpus 4096 --batch 16384 --network "${network}"
done >"${folder}/planned.txt"
