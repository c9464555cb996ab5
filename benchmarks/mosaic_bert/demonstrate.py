"""Pre-train both models for the same time on Python's documentation, fine-tune both,
and compare their scores.

    python demonstrate.py [--out DIR] [--seconds N]

On 2 CPU cores it takes less than 15 minutes, without network access.
Each step runs a program of this folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
MODELS = ("hf_bert", "mosaic_bert")
CALIBRATION_STEPS = 20
EVALUATIONS = 6
BATCH = 64
# Small enough to learn from little text in little time.
SHAPE = (
    "num_hidden_layers: 1, initializer_range: 0.12, hidden_dropout_prob: 0.0, "
    "attention_probs_dropout_prob: 0.0"
)
TRAINING = (
    "data_local=data",
    "train_loader.dataset.split=train",
    "tokenizer_name=prepared/vocab.txt",
    "max_seq_len=64",
    "model.pretrained_model_name=prajjwal1/bert-tiny",
    f"model.model_config={{{SHAPE}}}",
    f"global_train_batch_size={BATCH}",
    f"device_train_microbatch_size={BATCH}",
    f"device_eval_batch_size={BATCH}",
    "optimizer.lr=3e-3",
    "optimizer.betas=[0.9,0.98]",
    "optimizer.eps=1e-6",
    "scheduler.t_warmup=0.06dur",
    "console_log_interval=20ba",
)
RATES = {"hf_bert": "0.15", "mosaic_bert": "0.3"}  # published


def start(folder: Path, program: str, *words: str) -> None:
    """Run a program of this folder, or a module, in ``folder``;
    exit with its status if it fails.
    """
    print(f"$ python {program} {' '.join(words)}", flush=True)
    place = program if program == "-m" else str(HERE / program)
    done = subprocess.run([sys.executable, place, *words], cwd=folder, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def pretrain(folder: Path, model: str, name: str, steps: int) -> dict:
    """Pre-train for this many steps, unless that is already done, and return the run's summary."""
    summary = folder / name / "run_0/summary.json"
    if not summary.exists():
        start(
            folder,
            "main.py",
            str(HERE / "yamls/test/main.yaml"),
            f"model.name={model}",
            f"run_name={name}",
            f"save_folder={name}",
            f"max_duration={steps}ba",
            f"eval_interval={max(1, steps // EVALUATIONS)}ba",
            f"mlm_probability={RATES[model]}",
            *TRAINING,
        )
    return json.loads(summary.read_text(encoding="utf-8"))


def scores(folder: Path, model: str) -> dict[str, float]:
    """Fine-tune a pre-trained model on the GLUE-like tasks, and return its scores."""
    target = f"glue_{model}"
    start(
        folder,
        "glue.py",
        str(HERE / "yamls/demo/glue.yaml"),
        f"model.name={model}",
        f"starting_checkpoint_load_path={folder / model / 'run_0'}",
        "data.glue=tasks",
        f"save_finetune_checkpoint_folder={target}",
        f"base_run_name={model}",
    )
    return json.loads((folder / target / "glue_scores.json").read_text(encoding="utf-8"))


def main() -> None:
    """Run the demonstration, without repeating finished steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demonstration"), help="folder for everything"
    )
    parser.add_argument(
        "--seconds", type=float, default=150, help="pre-training time of each model"
    )
    given = parser.parse_args()
    folder = given.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").exists():
        start(
            folder,
            "common/convert_dataset.py",
            "--dataset",
            "python-text",
            "--out_root",
            "data",
            "--splits",
            "train",
            "val",
        )
    if not (folder / "prepared").exists():  # for its small vocabulary
        start(folder, "-m", "mlbert", "prepare", "python-text", "--out", "prepared")
    rows = []
    for model in MODELS:
        speed = pretrain(folder, model, f"speed_{model}", CALIBRATION_STEPS)["samples_per_second"]
        steps = max(2 * EVALUATIONS, int(given.seconds * speed / BATCH))
        rows.append(pretrain(folder, model, model, steps))
    tasks = [scores(folder, model) for model in MODELS]
    show(rows, tasks)


def show(rows: list[dict], tasks: list[dict]) -> None:
    """Print a table of the measurements."""
    table = Table(
        title="Both models after the same time",
        caption="Result not verified by MLCommons Association.",
    )
    for column in ("", *MODELS):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(
        "seconds in steps", *(f"{row['samples'] / row['samples_per_second']:.0f}" for row in rows)
    )
    table.add_row("sequences trained on", *(f"{row['samples']:,}" for row in rows))
    table.add_row("sequences per second", *(f"{row['samples_per_second']:.1f}" for row in rows))
    table.add_row("masked-LM accuracy", *(f"{row['accuracy']:.4f}" for row in rows))
    for name in tasks[0]["tasks"]:
        table.add_row(name, *(f"{task['tasks'][name]:.1f}" for task in tasks))
    table.add_row("glue", *(f"{task['glue']:.1f}" for task in tasks))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
