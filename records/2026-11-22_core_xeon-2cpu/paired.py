"""Training speed of two trees in turn: `paired.py BEFORE AFTER DATA OUT` writes a JSON line a run and the ratios.

Each run is the demonstration's recipe on its prepared text, 150 steps, seed 1, evaluations and checkpoints off.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

trees, data, out = {"before": Path(sys.argv[1]), "after": Path(sys.argv[2])}, Path(sys.argv[3]), Path(sys.argv[4])
SETTINGS = {
    "recipe": "packed_lamb",
    "input_dir": data / "train",
    "eval_dir": data / "eval",
    "train_batch_size": 32,
    "average_packing_rate": 1.05,
    "learning_rate": 5e-3,
    "max_steps": 150,
    "warmup_steps": 100,
    "opt_lamb_beta_1": 0.9,
    "opt_lamb_beta_2": 0.98,
    "weight_decay_rate": 0.01,
    "target_mlm_accuracy": 0.9,
    "max_samples_termination": 10**6,
    "num_eval_examples": 64,
    "eval_batch_size": 64,
    "eval_iter_start_samples": 10**6,
    "eval_iter_samples": 10**6,
    "seed": 1,
    "submission_org": "x",
    "submission_platform": "x",
    "submission_division": "open",
    "log_freq": 0,
}
rates = {name: [] for name in trees}
lines = []
for turn in range(4):
    for name, tree in trees.items():
        package = tree / "benchmarks/bert/implementations/pytorch"
        with tempfile.TemporaryDirectory() as folder:
            words = [
                w
                for k, v in {
                    **SETTINGS,
                    "bert_config_file": package / "configs/demo.json",
                    "output_dir": folder,
                }.items()
                for w in (f"--{k}", str(v))
            ]
            subprocess.run(
                [sys.executable, "-m", "mlbert.cli.main", "train", *words],
                env={**os.environ, "PYTHONPATH": str(package)},
                stdout=subprocess.DEVNULL,
            )
            summary = json.loads((Path(folder) / "run_0/summary.json").read_text())
        row = {
            "turn": turn,
            "tree": name,
            **{k: summary[k] for k in ("samples_per_second", "steps", "samples", "accuracy")},
        }
        print(json.dumps(row), flush=True)
        lines.append(row)
        if turn:
            rates[name].append(row["samples_per_second"])
ratios = [b / a for a, b in zip(rates["before"], rates["after"], strict=False)]
result = {"ratios_after_to_before": ratios, "median": statistics.median(ratios)}
print(json.dumps(result))
lines.append(result)
out.write_text("\n".join(map(json.dumps, lines)) + "\n")
