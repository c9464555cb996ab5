"""The rows of the settings table that only recipes on text and tasks read: none where a recipe has no use for it."""

# ruff: noqa: RUF009 - row() is dataclasses.field with the table's columns

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlbert.core.setting import row


@dataclass(frozen=True, kw_only=True)
class TextSettings:
    """What a run on streamed text or on a task's files has besides the settings of any run."""

    run_name: str | None = row("RUN_NAME", "Name of the run for people and loggers.")
    model_implementation: str | None = row(
        "MODEL_IMPLEMENTATION",
        "Whose model runs: ours, unpadded, or Hugging Face's of the same shape, padded.",
        choices=("mlbert", "huggingface"),
    )
    model_options: str | None = row(
        "MODEL_OPTIONS", "Values in place of those of BERT_CONFIG, name=value with blanks between."
    )
    tokenizer: str | None = row("TOKENIZER", "Vocabulary of text: a vocab.txt, its folder, or the name of a model.")
    data_remote: str | None = row(
        "DATA_REMOTE", "Folder or address that DATADIR_PHASE2 is the local copy of; none: it is the set itself."
    )
    eval_remote: str | None = row("EVAL_REMOTE", "Likewise for EVALDIR.")
    max_seq_length: int | None = row(
        "MAX_SEQ_LENGTH", "Longest sequence that is made of text.", "tokens", at_least=8, at_most=65_535
    )
    long_texts: str | None = row(
        "LONG_TEXTS",
        "What becomes of a text beyond MAX_SEQ_LENGTH: further sequences, or nothing.",
        choices=("split", "truncate"),
    )
    shuffle: str | None = row(
        "SHUFFLE",
        "Order of the texts, as MosaicML Streaming names it; none: as they lie.",
        choices=("naive", "py1s", "py2s", "py1b", "py1br", "py1e"),
    )
    shuffle_seed: int | None = row("SHUFFLE_SEED", "Of that order.", at_least=0, at_most=2**32 - 1)
    canonical_nodes: int | None = row(
        "CANONICAL_NODES", "Parts of the set that are shuffled and read side by side.", at_least=1, at_most=65_536
    )
    masking_rate: float | None = row("MASKING_RATE", "Chance of a token to be predicted.", above=0, below=1)
    masking_rate_end: float | None = row(
        "MASKING_RATE_END", "The same at the end of training; none: it stays.", above=0, below=1
    )
    masking_schedule: str | None = row(
        "MASKING_SCHEDULE",
        "How the rate gets there; step: half-way.",
        choices=("constant", "linear", "cosine", "step"),
    )
    eval_masking_rate: float | None = row("EVAL_MASKING_RATE", "MASKING_RATE of the evaluation.", above=0, below=1)
    drop_last: bool | None = row("DROP_LAST", "Leave an epoch's last step out where it is not full.")
    decay_all: bool | None = row("DECAY_ALL", "Weight decay on biases and LayerNorm, too.")
    auto_micro_batch: bool | None = row("AUTO_MICRO_BATCH", "Double GRADIENT_STEPS when the device runs out of memory.")
    tensorboard_dir: Path | None = row(
        "TENSORBOARD_DIR", "Folder for TensorBoard's event files, a folder for each run; none writes none."
    )
    wandb_project: str | None = row(
        "WANDB_PROJECT",
        "Project of Weights & Biases; offline, in the run folder, where nobody is logged in. none: logs nothing there.",
    )
    task: str | None = row("TASK", "Task to fine-tune on: one of GLUE's, or none for files with columns.")
    text_columns: str | None = row("TEXT_COLUMNS", "Columns of a task's text or pair of texts, with a comma between.")
    label_column: str | None = row("LABEL_COLUMN", "Column of a task's label.")
    num_labels: int | None = row(
        "NUM_LABELS", "Classes of a task; 1 for a number to be predicted.", at_least=1, at_most=100_000
    )
    metric: str | None = row("METRIC", "The task's metric that TARGET_MLM_ACCURACY is compared with.")
