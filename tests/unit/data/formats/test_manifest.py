"""The manifest says what is wrong with itself, and sets know their vocabulary."""

import copy
import functools
import json
import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlbert.data.formats.manifest import file_sha256, read_manifest
from mlbert.data.formats.open import check_vocabulary, describe
from mlbert.data.formats.prepared import ShardSet
from mlbert.host.errors import UserError
from user_errors import user_error


def test_bad_manifest(tmp_path):
    path, no_more = tmp_path / "manifest.json", b'{"format": "mlbert-ragged", "version": 1}'
    for content in (b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", no_more):
        path.write_bytes(content)
        with user_error("file.json", path):
            read_manifest(tmp_path)
    path.write_bytes(b'{"format": "other", "version": 3}')
    with user_error("data.format", path):
        read_manifest(tmp_path)
    path.unlink()
    with user_error("data.incomplete", tmp_path):
        read_manifest(tmp_path)
    os.mkfifo(path)
    absent = tmp_path / "absent"
    for folder, code, subject in ((tmp_path, "file.unreadable", path), (absent, "file.missing", absent)):
        with user_error(code, subject):  # and does not wait for a writer
            read_manifest(folder)


def test_vocabulary_must_be_the_one_prepared_with(make_set, tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n")
    check_vocabulary(describe(make_set(vocabulary=file_sha256(vocab), name="good")), vocab)
    with user_error("vocabulary.mismatch", vocab):
        check_vocabulary(describe(make_set(name="bad")), vocab)
    with user_error("file.unreadable", tmp_path / "absent.txt"):
        check_vocabulary(describe(tmp_path / "bad"), tmp_path / "absent.txt")


JUNK = [None, True, -1, 0, 1 << 70, 1e999, 0.5, "", "x", "9", "../x", "a" * 64, [], [[]], {}, [-1], [1 << 70]]


def places(document: object) -> list[tuple]:
    """Return the keys that lead to each value."""
    if not isinstance(document, (dict, list)):
        return []
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    return [(key, *way) for key, value in inside for way in [(), *places(value)]]


@given(data=st.data())
@settings(max_examples=150)
def test_an_edited_manifest_is_refused_or_equivalent(make_set, tmp_path, data):
    folder = tmp_path / "set"
    if not folder.exists():
        (make_set(20) / "manifest.json").rename(tmp_path / "right.json")
    right = json.loads((tmp_path / "right.json").read_text())
    *way, last = data.draw(st.sampled_from(places(right)))
    edited = copy.deepcopy(right)
    inner = functools.reduce(lambda value, key: value[key], way, edited)
    if data.draw(st.booleans()):
        inner[last] = data.draw(st.sampled_from(JUNK))
    else:
        del inner[last]
    (folder / "manifest.json").write_text(json.dumps(edited))
    try:
        store = ShardSet.open(folder, verify=True)
    except UserError:
        return
    may_differ = ("content_sha256", "max_seq_length", "max_predictions", "size", "sha256")
    assert "provenance" in way or last in ("provenance", *may_differ) or edited == right
    assert store.gather(np.arange(20)).lengths.max() <= store.info.max_seq_length
    assert store.info.vocab_size > int(store.gather(np.arange(20)).tokens.max())
