"""Instances are the benchmark's, draw by draw."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest

from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.wordpiece import WordPieceTokenizer, load_vocabulary
from mlbert.data.prepare.instances import (
    FEATURES,
    InstanceOptions,
    create_instances,
    digest,
    padded_feature,
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
        for name in FEATURES:
            ours = padded_feature(rows, name, 512, 76)[: len(reference[name])]
            assert np.array_equal(ours, reference[name].reshape(ours.shape)), name


def joined(sentences):
    return [token for sentence in sentences for token in sentence]


def plain_instances(documents, tokenizer, options):
    """The generator's definition with the standard library's draws only; returns (A + B before masking, label)."""
    rng = random.Random(options.random_seed)
    rng.shuffle(documents)
    limit, result = options.max_seq_length - 3, []
    for _ in range(options.dupe_factor):
        for index, document in enumerate(documents):
            target = rng.randint(2, limit) if rng.random() < options.short_seq_prob else limit
            chunk, at = [], 0
            while at < len(document):
                chunk.append(document[at])
                if at == len(document) - 1 or sum(map(len, chunk)) >= target:
                    a, b, unused, is_random = plain_pair(documents, index, chunk, target, rng)
                    plain_truncation(a, b, limit, rng)
                    _burn_masking(len(a) + len(b), tokenizer, options, rng)
                    result.append((a + b, is_random))
                    at, chunk = at - unused, []
                at += 1
    rng.shuffle(result)
    return result


def plain_pair(documents, index, chunk, target, rng):
    """Sentences A and B of a chunk, how many of its sentences go back, and whether B is a random one."""
    cut = rng.randint(1, len(chunk) - 1) if len(chunk) > 1 else 1
    a = joined(chunk[:cut])
    if len(chunk) > 1 and rng.random() >= 0.5:
        return a, joined(chunk[cut:]), 0, False
    for _ in range(10):
        other = rng.randint(0, len(documents) - 1)
        if other != index:
            break
    b, start = [], rng.randint(0, len(documents[other]) - 1)
    for sentence in documents[other][start:]:
        b = b + sentence
        if len(b) >= target - len(a):
            break
    return a, b, len(chunk) - cut, True


def plain_truncation(a, b, limit, rng):
    while len(a) + len(b) > limit:
        longer = a if len(a) > len(b) else b
        if rng.random() < 0.5:
            del longer[0]
        else:
            longer.pop()


def _burn_masking(words, tokenizer, options, rng):
    rng.shuffle(list(range(words)))
    for _ in range(min(options.max_predictions_per_seq, max(1, round((words + 3) * options.masked_lm_prob)))):
        if rng.random() >= 0.8 and rng.random() >= 0.5:
            rng.randint(0, len(tokenizer.vocabulary) - 1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("length", [8, 24, 100, 512])
def test_equals_the_definition(assets, seed, length):
    tokenizer = WordPieceTokenizer(load_vocabulary(assets / "vocab.txt"))
    options = InstanceOptions(
        max_seq_length=length,
        max_predictions_per_seq=min(20, length),
        dupe_factor=2,
        short_seq_prob=0.3,
        random_seed=seed,
    )
    ours = create_instances(read_documents(assets / "text.txt", tokenizer), tokenizer, options)
    expected = plain_instances(read_documents(assets / "text.txt", tokenizer), tokenizer, options)
    assert len(ours) == len(expected)
    for instance, (words, is_random) in zip(ours, expected, strict=True):
        tokens = list(instance.tokens)
        for position, label in zip(instance.positions, instance.labels, strict=True):
            tokens[position] = label
        boundaries = (0, instance.first_length - 1, len(tokens) - 1)
        assert [token for at, token in enumerate(tokens) if at not in boundaries] == words
        assert instance.random_next == is_random


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


def test_one_document_takes_its_second_sentence_from_itself(tmp_path, assets):
    text = tmp_path / "part"
    text.write_text("The lamp was lit.\nThe cat slept.\n")
    assert len(make(text, assets / "vocab.txt", InstanceOptions())) >= 10


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (b"", "data.empty", ""),
        (b"\n \n\n", "data.empty", ""),
        (b"good\nbad \xff\xfe\n", "data.encoding", "line 2 is not UTF-8 (byte 5"),
        (gzip.compress(b"text", mtime=0), "data.encoding", "gzip"),
    ],
)
def test_bad_part(tmp_path, assets, content, code, named):
    text = tmp_path / "part"
    text.write_bytes(content)
    with user_error(code, text) as caught:
        make(text, assets / "vocab.txt", InstanceOptions())
    assert named in str(caught.value)


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
