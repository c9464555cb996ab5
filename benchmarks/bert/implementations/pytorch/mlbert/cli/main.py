"""The ``mlbert`` command; see `mlbert.host.command_line`.

Each command's module is imported only when that command runs, so that ``mlbert --help`` does not
need torch. Commands that judge results are those of mlaudit, which this package does not import:
they are looked up by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from mlbert.host.command_line import Command, program, run_program
from mlbert.host.registry import Registry

COMMANDS = Registry(
    {
        "prepare": Command("mlbert.cli.prepare", "Prepare text or data sets for training."),
        "train": Command("mlbert.cli.train", "Train once, from exports, flags or YAML."),
        "mosaic": Command(
            "mosaic_yaml.commands.main_yaml",
            "Pre-train on streamed text, from Mosaic's YAML.",
        ),
        "pretrain": Command("mlbert.cli.pretrain", "Pre-train a masked-LM model on your own text."),
        "finetune": Command(
            "mlbert.cli.finetune",
            "Fine-tune on a task, or predict with the result.",
        ),
        "glue": Command(
            "mosaic_yaml.commands.glue",
            "Fine-tune on all GLUE tasks in parallel, and score them.",
        ),
        "plan": Command("mlaudit.cli.plan", "Estimate the time, cost and memory of a run."),
        "report": Command(
            "mlaudit.cli.report", "Report the results of runs, as text or a page with figures."
        ),
        "fill-mask": Command("mlbert.cli.fill_mask", "Predict the words behind [MASK]."),
        "export": Command(
            "mlbert.cli.export", "Export a run or checkpoint to a Hugging Face folder."
        ),
        "convert": Command(
            "mlbert.cli.convert",
            "Convert TensorFlow, NVIDIA, Composer, Hugging Face checkpoints.",
        ),
        "submission": Command(
            "mlaudit.cli.submission",
            "Check, describe, extend, seal, export a submission tree.",
        ),
        "launch": Command(
            "mlbert.cli.launch", "Submit job chains, start ranks, and run launcher helpers."
        ),
        "cache": Command("mlbert.cli.cache", "List, measure and clear the user's cache."),
        "bench": Command("mlbert.cli.bench", "Compare speeds as ratios measured in one run."),
    }
)

_root = program(
    "mlbert",
    COMMANDS,
    summary="Train BERT and ModernBERT encoders: on your own text, or as MLPerf's benchmark.",
    epilog=(
        "Run mlbert COMMAND --help for details. "
        "Exit codes: 0 success, 1 a run or check failed, 2 wrong input; "
        "see docs/how_a_run_ends.md."
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; never returns."""
    # Harmless: a thread of torch's that has not used the GPU yet prints it in the first backward
    # pass.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    run_program("mlbert", _root, arguments)
