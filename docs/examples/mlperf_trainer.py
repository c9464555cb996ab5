"""Ten runs of Hugging Face's Trainer, each with its MLPerf log: python mlperf_trainer.py FOLDER."""

import secrets
import sys
import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from mlbert.mlperf.callback import MLPerfCallback

SHAPE = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
OPTIONS = {
    "per_device_train_batch_size": 32,
    "max_steps": 400,
    "learning_rate": 0.01,
    "eval_strategy": "steps",
    "eval_steps": 20,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}


def examples(count: int) -> list[dict]:
    """The label is the first token, in nine of ten."""
    return [
        {"input_ids": row, "labels": row[int(row.sum() % 10 == 0)]}
        for row in torch.randint(0, 8, (count, 6))
    ]


for index in range(10):
    log = MLPerfCallback(
        sys.argv[1], index, submitter="Example", system_name="trainer", exit_at_target=True
    )
    set_seed(seed := secrets.randbelow(2**31))
    model = BertForSequenceClassification(BertConfig(**SHAPE, num_labels=8))
    options = TrainingArguments(tempfile.mkdtemp(), seed=seed, **OPTIONS)
    data = {"train_dataset": examples(2048), "eval_dataset": examples(256)}
    score = {
        "compute_metrics": lambda p: {
            "MaskedAccuracy": (p.predictions.argmax(-1) == p.label_ids).mean()
        }
    }
    with log:
        Trainer(model, options, **data, **score, callbacks=[log]).train()
