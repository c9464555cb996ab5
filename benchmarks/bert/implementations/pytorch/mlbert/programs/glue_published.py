"""Published scores and fine-tuning settings of GLUE, for the model that a shape is closest to.

All figures are of ModernBERT's paper (`SOURCE`), which takes those of other models from their
papers: BERT's and MosaicBERT's from Portes et al. (2023), RoBERTa's from Liu et al. (2019). They
are of development sets; ModernBERT's are the best of a search over hyper-parameters. The paper does
not say which metric MRPC and QQP have; ours is the mean of accuracy and F1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from mlbert.config.bert_config import BertConfig
from mlbert.programs.glue_trials import PublishedScores, Trial

SOURCE = "arXiv:2412.13663v2, table 5"
SETTINGS_SOURCE = "arXiv:2412.13663v2, table 6"
SEARCH_SOURCE = "arXiv:2412.13663v2, appendix E.1"
LARGE = 1024  # hidden size of the large models
# Evaluations without a better one until a job stops. The paper stops early, but does not say when.
PATIENCE = 3
# Of ModernBERT's research repository; the other tasks' are MosaicML's.
MODERNBERT_BATCHES = {"mnli": 64}

_SEARCHED_RATES = (1e-5, 3e-5, 5e-5, 8e-5)
_SEARCHED_DECAYS = (1e-6, 5e-6, 8e-6, 1e-5)
_SEARCHED_EPOCHS = (2, 5, 10)
_FEWER_EPOCHS = (1, 2, 3)  # of the tasks below
_TASKS_WITH_FEWER_EPOCHS = frozenset({"sst2", "mnli", "rte"})

_BERT_BASE = PublishedScores.of_row("BERT-base", [59.0, 93.1, 89.5, 89.4, 91.4, 85.4, 91.6, 78.2])
_BERT_LARGE = PublishedScores.of_row("BERT-large", [56.2, 93.3, 87.8, 90.6, 90.9, 86.3, 92.8, 83.8])
_ROBERTA_BASE = PublishedScores.of_row(
    "RoBERTa-base", [63.6, 94.8, 90.2, 91.2, 91.9, 87.6, 92.8, 78.7]
)
_ROBERTA_LARGE = PublishedScores.of_row(
    "RoBERTa-large", [68.0, 96.4, 90.9, 92.4, 92.2, 90.2, 94.7, 86.6]
)
_MOSAIC_BASE = PublishedScores.of_row(
    "MosaicBERT-base", [58.2, 93.5, 89.0, 90.3, 92.0, 85.6, 91.4, 83.0]
)
_MODERN_BASE = PublishedScores.of_row(
    "ModernBERT-base", [65.1, 96.0, 92.2, 91.8, 92.1, 89.1, 93.9, 87.4]
)
_MODERN_LARGE = PublishedScores.of_row(
    "ModernBERT-large", [71.4, 97.1, 91.7, 92.8, 92.7, 90.8, 95.2, 92.1]
)

_MODERN_BASE_TRIALS = {
    "cola": Trial(8e-5, 1e-6, 5),
    "mnli": Trial(5e-5, 5e-6, 1),
    "mrpc": Trial(5e-5, 5e-6, 10),
    "qnli": Trial(8e-5, 5e-6, 2),
    "qqp": Trial(5e-5, 5e-6, 10),
    "rte": Trial(5e-5, 1e-5, 3),
    "sst2": Trial(8e-5, 1e-5, 2),
    "stsb": Trial(8e-5, 5e-6, 10),
}
_MODERN_LARGE_TRIALS = {
    "cola": Trial(3e-5, 8e-6, 5),
    "mnli": Trial(3e-5, 1e-5, 1),
    "mrpc": Trial(8e-5, 5e-6, 2),
    "qnli": Trial(3e-5, 5e-6, 2),
    "qqp": Trial(5e-5, 8e-6, 2),
    "rte": Trial(5e-5, 8e-6, 3),
    "sst2": Trial(1e-5, 1e-6, 3),
    "stsb": Trial(8e-5, 1e-5, 10),
}


def published_scores(shape: BertConfig) -> list[PublishedScores]:
    """Return the scores of BERT and of the published model of this form, if any, at the size that
    is closer.
    """
    is_large = shape.hidden_size >= LARGE
    found = [_BERT_LARGE if is_large else _BERT_BASE]
    if shape.is_rotary:
        found.append(_MODERN_LARGE if is_large else _MODERN_BASE)
    elif shape.position_embedding_type == "alibi":
        if not is_large:
            found.append(_MOSAIC_BASE)
    elif shape.position_offset:
        found.append(_ROBERTA_LARGE if is_large else _ROBERTA_BASE)
    return found


def modernbert_trials(shape: BertConfig) -> Mapping[str, Trial]:
    """Return the best hyper-parameters of ModernBERT for each task, at the size that is closer."""
    return _MODERN_LARGE_TRIALS if shape.hidden_size >= LARGE else _MODERN_BASE_TRIALS


def searched_trials(task: str) -> list[Trial]:
    """Return the hyper-parameters that ModernBERT's paper searches for a task: 48."""
    epochs = _FEWER_EPOCHS if task in _TASKS_WITH_FEWER_EPOCHS else _SEARCHED_EPOCHS
    grid = itertools.product(_SEARCHED_RATES, _SEARCHED_DECAYS, epochs)
    return [Trial(*values) for values in grid]
