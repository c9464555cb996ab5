"""The scores of a fine-tuned model next to those of simple methods.

The simple methods: the most frequent class, or the mean; a linear model on TF-IDF features, if
scikit-learn is installed; for tags of words, each word's most frequent tag.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from mlbert.data.formats.entities import count_entities, sum_counts
from mlbert.data.formats.tasks import TaskForm, TaskRows, classes_of_set, read_columns
from mlbert.host.console import new_table, safe
from mlbert.host.errors import install_words
from mlbert.models import task_model
from mlbert.models.label_lists import has_entities, set_scores
from mlbert.models.objectives import class_scores, confusion, correlations

MOST_CLASSES = 20  # of a printed matrix
_OWN = "this model"


def report(
    folder: Path, form: TaskForm, train: TaskRows, evaluation: TaskRows
) -> tuple[list[Table], str]:
    """Return the scores of a finished run next to the baselines, those of each class,
    and a note.
    """
    if form.kind == "tags":
        return _report_of_tags(folder, train, evaluation), ""
    (words,) = read_columns(folder / task_model.PREDICTIONS, ["prediction"]).columns
    if form.kind == "set":
        return _report_of_sets(words, train, evaluation)
    return _report_of_labels(words, train, evaluation)


def joined_texts(rows: TaskRows) -> list[str]:
    """Return the text of each row, pairs joined."""
    return [" ".join(parts) for parts in zip(*rows.texts, strict=True)]


def _report_of_labels(
    words: Sequence[str], train: TaskRows, evaluation: TaskRows
) -> tuple[list[Table], str]:
    labels = evaluation.labels
    classes = train.classes
    assert labels is not None
    found, note = baselines(train, evaluation)
    found[_OWN] = np.array([classes.index(word) if classes else float(word) for word in words])
    columns = ["accuracy", "mean F1"] if classes else ["RMSE", "Spearman"]
    tables = [new_table("held-out rows", [""], columns)]
    for name, values in found.items():
        scores = _scores(values, labels, len(classes))
        tables[0].add_row(safe(name), *(f"{score:.4f}" for score in scores))
    if classes:
        counts = confusion(found[_OWN], labels, len(classes))
        names = [safe(name) for name in classes]
        scores_of_classes = class_scores(counts)
        of_class = new_table("classes", [""], [*scores_of_classes, "rows"])
        matrix = new_table("label (line) and prediction (column)", [""], names)
        for i, name in enumerate(names):
            cells = [f"{score[i]:.4f}" for score in scores_of_classes.values()]
            of_class.add_row(name, *cells, str(counts[i].sum()))
            matrix.add_row(name, *map(str, counts[i]))
        tables.append(of_class)
        if len(classes) <= MOST_CLASSES:
            tables.append(matrix)
    return tables, note


def _scores(predicted: np.ndarray, labels: np.ndarray, num_classes: int) -> tuple[float, float]:
    """Return accuracy and mean F1 of the classes that occur;
    for numbers RMSE and Spearman's correlation.
    """
    if not num_classes:
        rmse = float(np.sqrt(np.mean((predicted - labels) ** 2)))
        return rmse, correlations(predicted, labels)["spearman"]
    counts = confusion(predicted, labels, num_classes)
    accuracy = counts.trace() / counts.sum()
    occurs = counts.sum(axis=1) > 0
    return accuracy, class_scores(counts)["F1"][occurs].mean()


def baselines(train: TaskRows, evaluation: TaskRows) -> tuple[dict[str, np.ndarray], str]:
    """Return the predictions of simple methods by name, and a note on what is missing."""
    assert train.labels is not None
    most = np.bincount(train.labels.astype(int)).argmax() if train.classes else 0
    name, value = (
        (train.classes[most], most) if train.classes else ("the mean", train.labels.mean())
    )
    found = {f"always {name}": np.full(len(evaluation), value)}
    features, note = _tf_idf(train, evaluation)
    if features is None:
        return found, note
    linear_models = features.linear_models
    if train.classes:
        name = "logistic"
        model = linear_models.LogisticRegression(max_iter=1000)
    else:
        name = "ridge"
        model = linear_models.Ridge()
    predicted = model.fit(features.train, train.labels).predict(features.evaluation)
    return {**found, f"TF-IDF + {name} regression": predicted}, ""


class _Features(NamedTuple):
    """TF-IDF of words and pairs of words, a sparse matrix each [N, features]."""

    train: Any
    evaluation: Any
    linear_models: ModuleType  # of scikit-learn, to be fitted to them


def _tf_idf(train: TaskRows, evaluation: TaskRows) -> tuple[_Features | None, str]:
    """Return the features of both, or None and a note on why there are none."""
    try:
        import sklearn.linear_model as linear_models
        from sklearn.feature_extraction.text import TfidfVectorizer

        words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"\w+")
        of_train = words.fit_transform(joined_texts(train))
        of_evaluation = words.transform(joined_texts(evaluation))
    except ImportError:
        return None, f"For a TF-IDF baseline: {install_words('finetune')}"
    except ValueError as error:  # the texts have no words
        return None, f"no TF-IDF baseline: {error}"
    return _Features(of_train, of_evaluation, linear_models), ""


def _report_of_sets(
    words: Sequence[str], train: TaskRows, evaluation: TaskRows
) -> tuple[list[Table], str]:
    classes = train.classes
    labels = is_in_set(evaluation)
    found, note = set_baselines(train, evaluation)
    own = np.zeros_like(labels)
    for row, word in enumerate(words):
        for name in classes_of_set(word):
            own[row, classes.index(name)] = True
    found[_OWN] = own
    summary = new_table("held-out rows", [""], ["micro F1", "macro F1", "whole set right"])
    for name, predicted in found.items():
        scores = set_scores(predicted, labels)
        cells = [f"{scores[key]:.4f}" for key in ("micro_f1", "macro_f1", "set_accuracy")]
        summary.add_row(safe(name), *cells)
    of_class = new_table("classes", [""], ["precision", "recall", "F1", "rows"])
    for number, name in enumerate(classes):
        right = int((own[:, number] & labels[:, number]).sum())
        predicted_rows = int(own[:, number].sum())
        rows = int(labels[:, number].sum())
        scores_of_class = (
            right / max(predicted_rows, 1),
            right / max(rows, 1),
            2 * right / max(predicted_rows + rows, 1),
        )
        of_class.add_row(safe(name), *(f"{score:.4f}" for score in scores_of_class), str(rows))
    return [summary, of_class], note


def is_in_set(rows: TaskRows) -> np.ndarray:
    """Return bool [N, L]: whether a class applies to a row."""
    assert rows.label_lists is not None
    found = np.zeros((len(rows), len(rows.classes)), bool)
    for row, numbers in enumerate(rows.label_lists):
        found[row, numbers] = True
    return found


def set_baselines(train: TaskRows, evaluation: TaskRows) -> tuple[dict[str, np.ndarray], str]:
    """Return the predictions of simple methods by name, bool [N, L], and a note on what is
    missing."""
    known = is_in_set(train)
    most = int(known.sum(axis=0).argmax())
    always = np.zeros((len(evaluation), len(train.classes)), bool)
    always[:, most] = True
    found = {f"always {train.classes[most]}": always}
    features, note = _tf_idf(train, evaluation)
    if features is None:
        return found, note
    predicted = np.zeros_like(always)
    for number in range(len(train.classes)):
        applies = known[:, number]
        if applies.all() or not applies.any():
            predicted[:, number] = applies[0]
            continue
        model = features.linear_models.LogisticRegression(max_iter=1000)
        model.fit(features.train, applies)
        predicted[:, number] = model.predict(features.evaluation)
    return {**found, "TF-IDF + logistic regression": predicted}, ""


def _report_of_tags(folder: Path, train: TaskRows, evaluation: TaskRows) -> list[Table]:
    labeled = _tags(evaluation)
    own = _read_predicted_tags(folder / task_model.TAGGED_PREDICTIONS)
    found = {"each word's most frequent tag": frequent_tags(train, evaluation), _OWN: own}
    if not has_entities(train.classes):
        summary = new_table("held-out words", [""], ["accuracy"])
        for name, predicted in found.items():
            summary.add_row(name, f"{_accuracy(predicted, labeled):.4f}")
        return [summary]
    columns = ["precision", "recall", "F1", "accuracy of words"]
    summary = new_table("held-out entities", [""], columns)
    for name, predicted in found.items():
        total = sum_counts(list(count_entities(predicted, labeled).values()))
        scores = (total.precision, total.recall, total.f1, _accuracy(predicted, labeled))
        summary.add_row(name, *(f"{score:.4f}" for score in scores))
    of_kind = new_table("kinds", [""], ["precision", "recall", "F1", "entities"])
    for kind, counts in count_entities(own, labeled).items():
        scores_of_kind = (counts.precision, counts.recall, counts.f1)
        cells = [f"{score:.4f}" for score in scores_of_kind]
        of_kind.add_row(safe(kind), *cells, str(counts.labeled))
    return [summary, of_kind]


def frequent_tags(train: TaskRows, evaluation: TaskRows) -> list[list[str]]:
    """Return for each word the tag that it has most often in the training rows; for an unknown word
    the most frequent tag of all."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    total: Counter[str] = Counter()
    for words, tags in zip(train.words or (), _tags(train), strict=True):
        for word, tag in zip(words, tags, strict=True):
            counts[word.strip()][tag] += 1
            total[tag] += 1
    usual = total.most_common(1)[0][0]
    best = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
    return [[best.get(word.strip(), usual) for word in words] for words in evaluation.words or ()]


def _tags(rows: TaskRows) -> list[list[str]]:
    return [[rows.classes[number] for number in numbers] for numbers in rows.label_lists or ()]


def _read_predicted_tags(path: Path) -> list[list[str]]:
    texts = path.read_text(encoding="utf-8").strip("\n").split("\n\n")
    return [[line.rsplit(" ", 1)[1] for line in text.split("\n")] for text in texts]


def _accuracy(predicted: Sequence[Sequence[str]], labeled: Sequence[Sequence[str]]) -> float:
    pairs = [
        (guess, truth)
        for guesses, truths in zip(predicted, labeled, strict=True)
        for guess, truth in zip(guesses, truths, strict=True)
    ]
    return sum(guess == truth for guess, truth in pairs) / max(len(pairs), 1)
