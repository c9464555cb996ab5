"""Instances are the benchmark's, draw by draw."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlbert.data.formats.padded import NAMES, Widths, padded
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.wordpiece import WordPieceTokenizer, load_vocabulary
from mlbert.data.prepare.instances import (
    InstanceOptions,
    create_instances,
    digest,
    read_documents,
)
from user_errors import user_error

GOLDEN = json.loads((Path(__file__).resolve().parents[3] / "assets" / "instances" / "digests.json").read_text())
PUBLISHED = {
    0: (6804, "37b4c76d10e6ea4e706078ed34ccaf15deb3836b35224619862927d0ee29eee0"),
    1: (6881, "d1bd463a972686eaf9f20e00d2beae8edaf4968d0955c97635f37d30fe769be6"),
}


def make(text: Path, vocab: Path, options: InstanceOptions) -> Ragged:
    tokenizer = WordPieceTokenizer(load_vocabulary(vocab))
    return Ragged.from_rows(create_instances(read_documents(text, tokenizer), tokenizer, options))


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: str(golden["options"]))
def test_digests_of_our_own_text(assets, golden):
    options = InstanceOptions(**golden["options"])
    rows = make(assets / "text.txt", assets / "vocab.txt", options)
    assert len(rows) == golden["instances"]
    assert digest(rows, options.max_seq_length, options.max_predictions_per_seq) == golden["sha256"]


@pytest.mark.parametrize("part", [0, 1])
def test_published_generators_digests(shared_data, part):
    text = shared_data / "text" / f"part-{part:05d}-of-00002"
    rows = make(text, shared_data / "vocab.txt", InstanceOptions())
    assert (len(rows), digest(rows, 512, 76)) == PUBLISHED[part]
    with np.load(shared_data / "reference" / f"part-{part:05d}.npz") as reference:
        for name in NAMES:
            ours = padded(rows, name, Widths(512, 76))[: len(reference[name])]
            assert np.array_equal(ours, reference[name].reshape(ours.shape)), name


def test_blank_means_blank_after_stripping(tmp_path, assets):
    tokenizer = WordPieceTokenizer(load_vocabulary(assets / "vocab.txt"))
    text = tmp_path / "part"
    text.write_bytes("one\r\ntwo\n\u00a0\u2003\nthree\rfour\n\n\nfive".encode())
    documents = read_documents(text, tokenizer)
    assert [len(document) for document in documents] == [2, 1, 1]


def test_carriage_returns_are_dropped_as_tensorflow_drops_them(tmp_path, assets):
    tokenizer = WordPieceTokenizer(load_vocabulary(assets / "vocab.txt"))
    text = tmp_path / "part"
    text.write_bytes(b"the la\rmp\r\r\n\r\r\ncaf\xc3\r\xa9\n")
    assert read_documents(text, tokenizer) == [[tokenizer.encode("the lamp")], [tokenizer.encode("caf\u00e9")]]


@pytest.mark.parametrize(
    "options",
    [
        {"max_seq_length": 4},
        {"max_seq_length": 70_000},
        {"max_predictions_per_seq": 0},
        {"masked_lm_prob": 0.0},
        {"short_seq_prob": 1.5},
        {"dupe_factor": 0},
    ],
)
def test_options_out_of_range(options):
    with user_error("config.range", next(iter(options))):
        InstanceOptions(**options)
