"""The accuracy that `mlbert pretrain` reports: of tokens that the model cannot see,
like the baselines' next to it.
"""

import random
from dataclasses import asdict

import numpy as np
import pytest

from mlbert.data.formats.manifest import write_json
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.loading import text_run
from mlbert.data.loading.config import CorpusConfig, DataConfig, TextConfig
from mlbert.data.loading.masked_text import TextEvalSet
from mlbert.data.prepare.corpus_files import find_sources
from mlbert.data.prepare.custom_corpus import Facts, Request, prepare
from mlbert.host.json_files import add_checksum
from mlbert.programs.custom_corpus.corpus_plan import make_plan, resolve_settings
from mlbert.programs.custom_corpus.own_folder import OwnFolder
from mlbert.programs.custom_corpus.run import BaselineWarnings
from mlbert.programs.pretrain_rules import EVAL_MASK_RATE
from mlbert.runs.progress import TrainState
from mlbert.training.config import EvaluationConfig

ARABIC = "ابتثجحخدذرزسشصضطظعغفقكلمنهوي"
SECONDS = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> OwnFolder:
    """A prepared text whose most frequent token is rarer than [SEP],
    which occurs once in each sequence.
    """
    made = tmp_path_factory.mktemp("accuracy")
    draw = random.Random(1)
    words = ["".join(draw.choices(ARABIC, k=4)) for _ in range(800)]
    weights = [4] + [1] * (len(words) - 1)  # 0.5 % of the text, where [SEP] has 0.8 %
    lines = [" ".join(draw.choices(words, weights, k=40)) for _ in range(2500)]
    (made / "text.txt").write_text("\n\n".join(lines), encoding="utf-8")
    return OwnFolder(made)


def request_of(folder: OwnFolder) -> Request:
    sources = find_sources([folder.path / "text.txt"], folder.path)
    return Request(sources, None, 2000, None, 128, EVAL_MASK_RATE)


@pytest.fixture(scope="module")
def facts(folder: OwnFolder) -> Facts:
    return prepare(request_of(folder), folder.text)


@pytest.fixture(scope="module")
def tokenizer(folder: OwnFolder, facts: Facts) -> Tokenizer:
    return load_tokenizer(folder.text)


@pytest.fixture(scope="module")
def evaluation(folder: OwnFolder, facts: Facts) -> TextEvalSet:
    """The evaluation set of a run in the folder, with the settings of `mlbert pretrain`."""
    plan = make_plan(1_000_000, SECONDS, "tiny", None)
    config = resolve_settings(folder, plan.settings, SECONDS, facts.train_sequences, False).config
    made = text_run.make_evaluation_set(
        config[DataConfig],
        config[TextConfig],
        config[CorpusConfig],
        num_examples=config[EvaluationConfig].num_eval_examples,
        batch_size=config[EvaluationConfig].eval_batch_size,
        rank=0,
        world_size=1,
    )
    made.open()
    return made


def test_every_token_to_predict_is_hidden(evaluation: TextEvalSet, tokenizer: Tokenizer) -> None:
    for batch in evaluation:
        arrays = batch.arrays()
        shown = arrays["ids"][arrays["masked_positions"]]
        assert (shown == tokenizer.mask_id).all()
        assert not np.isin(arrays["masked_labels"], tokenizer.special_ids).any()


def test_the_most_frequent_token_is_a_word_and_its_accuracy_that_of_a_model_which_knows_no_other(
    evaluation: TextEvalSet, tokenizer: Tokenizer, facts: Facts
) -> None:
    guess = facts.baselines["most_frequent_id"]
    assert guess not in tokenizer.special_ids
    labels = np.concatenate([batch.arrays()["masked_labels"] for batch in evaluation])
    accuracy = float(np.mean(labels == guess))
    assert 0 < accuracy == facts.baselines["most_frequent_accuracy"]
    said: list[str] = []
    state = TrainState()
    state.accuracy = accuracy
    BaselineWarnings(said.append, SECONDS, facts.baselines).evaluation(state, {}, 0.4 * SECONDS)
    (line,) = said
    assert "the model has learned nothing else yet" in line


def test_text_prepared_for_another_measure_is_prepared_again(
    folder: OwnFolder, facts: Facts
) -> None:
    before = asdict(facts)
    del before["made_from"]["eval_masking"]
    before["baselines"]["most_frequent_accuracy"] = 0.0
    write_json(folder.text / "text.json", add_checksum(before))
    assert prepare(request_of(folder), folder.text) == facts
