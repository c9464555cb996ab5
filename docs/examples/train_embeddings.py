"""Train embeddings of texts on pairs or triplets with sentence-transformers, starting from a folder
of `mlbert pretrain` or `mlbert export`.

    python train_embeddings.py my-model/model pairs.csv embeddings

A row of pairs.csv or pairs.jsonl has an "anchor", such as a question, a "positive", the text to
find for it, and perhaps a "negative", a text that is not to be found. The positives of the other
rows in a batch are negatives, too. A fifth of the anchors is held out: recall@1 is the share of
them whose nearest text, of all positives of the file, is theirs.
"""

import csv
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sklearn.feature_extraction.text import TfidfVectorizer

COLUMNS = ("anchor", "positive", "negative")
HELD_OUT = 5  # one anchor of so many
BATCH = 32
RATE = 5e-5 * 768  # learning rate times hidden size


def refuse(line):
    """Print one line about a mistake, and exit with status 2."""
    print(line, file=sys.stderr)
    sys.exit(2)


def read_rows(path):
    """Return the rows of a file, each with the columns that the first one has."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            if Path(path).suffix == ".csv":
                rows = list(csv.DictReader(file))
            else:
                rows = [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError) as error:
        refuse(f"{path}: cannot be read ({error})")
    columns = [name for name in COLUMNS if rows and name in rows[0]]
    if columns[:2] != list(COLUMNS[:2]):
        refuse(f"{path}: needs rows with the columns anchor and positive")
    for number, row in enumerate(rows, 1):
        missing = [name for name in columns if not row.get(name)]
        if missing:
            refuse(f"{path}: row {number} has no {missing[0]}")
    if len({row["anchor"] for row in rows}) < 2:
        refuse(f"{path}: needs two or more different anchors, one of which is held out")
    return [{name: row[name] for name in columns} for row in rows]


def split(rows, seed=1):
    """Return the rows to train on, and those of the anchors that are held out."""
    anchors = list(dict.fromkeys(row["anchor"] for row in rows))
    random.Random(seed).shuffle(anchors)
    held_out = set(anchors[: max(1, len(anchors) // HELD_OUT)])
    train = [row for row in rows if row["anchor"] not in held_out]
    return train, [row for row in rows if row["anchor"] in held_out]


def recall(embed, questions, texts):
    """Return the share of the questions, anchor -> positives, whose nearest text is a positive.

    ``embed`` returns one row of length 1 for each text.
    """
    likeness = embed(list(questions)) @ embed(texts).T
    nearest = np.asarray(likeness.argmax(axis=1)).ravel()
    found = [
        texts[number] in positives
        for number, positives in zip(nearest, questions.values(), strict=True)
    ]
    return sum(found) / len(found)


def train(model, rows, out, epochs):
    """Train with in-batch negatives, without two equal texts in a batch."""
    settings = SentenceTransformerTrainingArguments(
        out,
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE / model.get_embedding_dimension(),
        warmup_steps=0.1,  # of all steps
        batch_sampler="no_duplicates",
        save_strategy="no",
        report_to=[],
    )
    loss = MultipleNegativesRankingLoss(model)
    data = Dataset.from_list(rows)
    SentenceTransformerTrainer(model, settings, train_dataset=data, loss=loss).train()


def main(start, data, out, epochs=5):
    rows = read_rows(data)
    train_rows, held_out = split(rows)
    texts = list(dict.fromkeys(row["positive"] for row in rows))
    questions = defaultdict(set)
    for row in held_out:
        questions[row["anchor"]].add(row["positive"])
    print(f"{len(train_rows)} rows to train on; {len(questions)} anchors held out")

    words = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+").fit(texts)
    model = SentenceTransformer(start)

    def embed(texts):
        return model.encode(texts, normalize_embeddings=True)

    scores = {"TF-IDF": recall(words.transform, questions, texts)}
    scores["before training"] = recall(embed, questions, texts)
    train(model, train_rows, out, epochs)
    scores["after training"] = recall(embed, questions, texts)
    print(f"recall@1 among {len(texts)} texts:")
    for name, score in scores.items():
        print(f"  {name:15} {score:.3f}")
    model.save_pretrained(out)
    return scores


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(float, sys.argv[4:]))
