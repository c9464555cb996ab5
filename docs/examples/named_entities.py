"""Train a tagger of named entities that starts from the folder of `mlbert pretrain`,
with transformers' Trainer.

    python named_entities.py my-model/model tagged.jsonl tagger

A line of tagged.jsonl: {"words": ["Ada", "lives", "in", "Paris"], "tags": ["B-PER", "O", "O",
"B-LOC"]}
"""

import json
import sys
from pathlib import Path

from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

IGNORED = -100  # label of special tokens and of a word's later pieces


def encode(row, tokenizer, numbers):
    encoded = tokenizer(row["words"], is_split_into_words=True, truncation=True)
    words = encoded.word_ids()
    is_first = [
        word is not None and word != before
        for word, before in zip(words, [None, *words[:-1]], strict=True)
    ]
    labels = [
        numbers[row["tags"][word]] if first else IGNORED
        for word, first in zip(words, is_first, strict=True)
    ]
    return {
        "input_ids": encoded["input_ids"],
        "attention_mask": encoded["attention_mask"],
        "labels": labels,
    }


def main(start, data, out, epochs=10):
    rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    tags = sorted({tag for row in rows for tag in row["tags"]})
    names = dict(enumerate(tags))
    numbers = {tag: number for number, tag in enumerate(tags)}
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = AutoModelForTokenClassification.from_pretrained(start, id2label=names, label2id=numbers)
    trainer = Trainer(
        model,
        TrainingArguments(
            out, num_train_epochs=epochs, learning_rate=3e-4, save_strategy="no", report_to=[]
        ),
        DataCollatorForTokenClassification(tokenizer),
        [encode(row, tokenizer, numbers) for row in rows],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(out)
    tagger = pipeline("token-classification", model=out, aggregation_strategy="first")
    for entity in tagger(" ".join(rows[0]["words"])):
        print(entity["entity_group"], entity["word"], f"{entity['score']:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(float, sys.argv[4:]))
