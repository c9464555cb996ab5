"""One way to open and to describe whatever lies in a folder."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from host_batches import numbers
from mlbert.data.formats.open import check_same_vocabulary, describe, open_store
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.tfrecord import write_examples
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.pretraining import EvalSet
from random_set import VOCAB_SIZE, random_rows
from stored_sets import names
from user_errors import user_error

SETTINGS = {"max_sequences_per_pack": 3, "seed": 0, "max_tokens": 512, "partition": contiguous}


@pytest.fixture
def records(tmp_path):
    folder = tmp_path / "records"
    folder.mkdir()
    write_examples(folder / "part-0.tfrecord", random_rows(90), 32, 5)
    return folder


def test_a_prepared_set(make_set):
    folder = make_set(50)
    info, store = describe(folder), open_store(folder)
    assert isinstance(store, ShardSet)
    assert store.info == info
    assert (info.kind, info.num_sequences, info.vocab_size, info.max_pack_tokens) == ("mlbert", 50, VOCAB_SIZE, None)
    assert info.identity == hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    assert names(store.gather(np.arange(50))) == names(random_rows(50))


def test_records_train_and_evaluate(records):
    info = describe(records)
    assert (info.kind, info.vocab_size) == ("tfrecord", None)
    source = PackedSource(records, packs_per_step=1, **SETTINGS, vocab_size=VOCAB_SIZE)
    source.open()
    seen = [n for step in range(source.steps_per_epoch) for batch in source.batches_of(step) for n in numbers(batch)]
    assert sorted(seen) == list(range(90))
    evaluation = EvalSet(records, 60, 4, max_sequences_per_pack=3, vocab_size=VOCAB_SIZE)
    evaluation.open()
    assert sorted(n for batch in evaluation for n in numbers(batch)) == list(range(60))


def test_token_ids_beyond_the_models_vocabulary_are_refused(records):
    source = PackedSource(records, packs_per_step=5, **SETTINGS, vocab_size=100)
    source.open()
    with user_error("data.model-mismatch", records):
        source.batches_of(0)
    with user_error("data.model-mismatch", records):
        EvalSet(records, 90, 4, max_sequences_per_pack=3, vocab_size=100).open()


def test_an_evaluation_set_that_is_too_small_is_noticed_when_it_is_opened(records):
    with user_error("config.range", records):
        EvalSet(records, 91, 4, max_sequences_per_pack=3).open()


def test_a_folder_of_nothing_known(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for look in (describe, open_store):
        with user_error("data.missing", tmp_path):
            look(tmp_path)
        with user_error("file.missing", tmp_path / "absent"):
            look(tmp_path / "absent")


def test_the_folder_above_data_sets_names_them(make_set):
    above = make_set(5, name="instances").parent
    make_set(5, name="packed")
    (above / "text").mkdir()
    for look in (describe, open_store):
        with user_error("data.format", above):
            look(above)


def test_unknown_vocabularies_agree_with_any(make_set):
    known = describe(make_set(5))
    unknown = replace(known, vocabulary_sha256=None)
    check_same_vocabulary(known, unknown)
    check_same_vocabulary(unknown, known)
    with user_error("vocabulary.mismatch", "set"):
        check_same_vocabulary(known, replace(known, vocabulary_sha256="0" * 64))
