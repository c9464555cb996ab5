"""Tokenized shards: equal to each text tokenized, kept apart from the set, checked, shared;
and what cannot be read.
"""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from file_limits import largest_file
from mds_samples import write_samples
from mlbert.data.formats import token_shards as module
from mlbert.data.formats.mds_tokens import decoder_of, width_of
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.token_shards import (
    TokenShards,
    describe_text,
    open_texts,
    vocabulary_sha256,
)
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from stored_sets import flip
from text_sets import random_texts, write_texts
from user_errors import user_error

TOKENIZER = load_tokenizer("bert-base-uncased")
HARD = ["", "a\nb\r\nc", "naïve “quoted” 東京", "x" * 5000, "\n", "! !", "\x00\x0b"]
TEXTS = random_texts(80)
pytestmark = pytest.mark.usefixtures("own_cache")
EXPECTED = [TOKENIZER.encode(text) for text in TEXTS]
TOO_LARGE, NEGATIVE = (np.array(ids, "<i8").tobytes() for ids in ([1, 30_522], [-1]))
STORED = Path(__file__).parents[3] / "assets/mds/tokens"
SEQUENCES = [[101, 2023, 2003, 102], [101, 7592, 2088, 999, 102], [101, 1996, 102]]
WORDS = np.array([101, 2023, 102], "<u2").tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_texts(tmp_path / "set", TEXTS)
    assert len(list(folder.glob("shard*"))) > 2
    return folder


def opened(folder: Path, remote: Path | None = None, tokenizer=TOKENIZER) -> TokenShards:
    streams = streams_of("", None, folder, remote and str(remote))
    return TokenShards(open_texts(streams, tokenizer), tokenizer)


def all_tokens(shards: TokenShards) -> list[list[int]]:
    found = []
    for number, size in enumerate(np.diff(shards.first).tolist()):
        shard = shards.shard(number)
        found += [shard.text(place).tolist() for place in range(size)]
    return found


def kept(folder: Path, remote: Path | None = None) -> list[Path]:
    return sorted(
        open_texts(streams_of("", None, folder, remote and str(remote)), TOKENIZER)[0].cache.glob(
            "tokens-*/*.ids"
        )
    )


def test_equal_to_each_text_tokenized(folder):
    shards = opened(folder)
    assert shards.ready(0) is None
    assert all_tokens(shards) == EXPECTED
    assert len(kept(folder)) == len(shards.first) - 1
    texts = [5, 3, 5, *range(80)]
    assert [tokens.tolist() for tokens in opened(folder).loose(texts)] == [
        EXPECTED[text] for text in texts
    ]


def test_hard_texts_at_once_equal_each_text_tokenized(tmp_path):
    folder = write_texts(tmp_path / "set", HARD * 3, size_limit=10_000)
    assert all_tokens(opened(folder)) == [TOKENIZER.encode(text) for text in HARD * 3]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("damage", ["flipped", "gone"])
def test_later_damage_of_a_shard_is_noticed(tmp_path, compression, damage):
    """Only the damaged shard is read again, and nothing is written into the folder of the set."""
    if compression:
        pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    folder = write_texts(tmp_path / "set", TEXTS, compression=compression)
    before = sorted(folder.iterdir())
    assert all_tokens(opened(folder)) == EXPECTED
    assert sorted(folder.iterdir()) == before
    path = before[2]
    (Path.unlink if damage == "gone" else flip)(path)
    shards = opened(folder)
    assert [shards.ready(number) is None for number in range(3)] == [False, True, False]
    if compression:  # the verified copy is still there
        assert all_tokens(shards) == EXPECTED
    else:
        with user_error("data.damaged" if damage == "flipped" else "file.unreadable", path):
            all_tokens(shards)


def test_damaged_tokens_are_made_again(folder):
    all_tokens(opened(folder))
    path = kept(folder)[1]
    good = path.read_bytes()
    changed = good[:-3] + bytes([good[-3] ^ 1]) + good[-2:]
    for bad in (good[:-2], changed, b"", good[:45] + b"\xff" + good[46:], good + b"\0\0"):
        path.write_bytes(bad)
        shards = opened(folder)
        assert shards.ready(1) is None
        assert all_tokens(shards) == EXPECTED
        assert path.read_bytes() == good


def test_another_vocabulary_is_kept_apart(folder, tmp_path):
    all_tokens(opened(folder))
    (tmp_path / "vocab.txt").write_text(
        "\n".join([*SPECIAL_TOKENS, "the", "river", "[unused]"]) + "\n"
    )
    other = load_tokenizer(tmp_path / "vocab.txt")
    shards = opened(folder, tokenizer=other)
    assert shards.ready(0) is None
    assert all_tokens(shards) == [other.encode(text) for text in TEXTS]
    assert all_tokens(opened(folder)) == EXPECTED


def test_another_set_in_the_folder_is_noticed(folder):
    all_tokens(opened(folder))
    for path in [*folder.glob("shard*"), folder / "index.json"]:
        path.unlink()
    texts = [text.upper() + " river" for text in TEXTS]
    write_texts(folder, texts)
    assert all_tokens(opened(folder)) == [TOKENIZER.encode(text) for text in texts]


def test_memory_of_shards_that_cannot_be_kept_is_limited(folder, monkeypatch):
    all_tokens(opened(folder))
    made = kept(folder)[0].parent
    shutil.rmtree(made)
    made.write_text("in the way")
    shards = opened(folder)
    size = shards.shard(0).tokens.nbytes
    monkeypatch.setattr(module, "_MOST_MEMORY", 2 * size)
    assert all_tokens(shards) == EXPECTED
    assert sum(shards.ready(number) is not None for number in range(len(shards.first) - 1)) <= 3
    assert all_tokens(shards) == EXPECTED


def test_a_full_disk(folder):
    warnings: list[str] = []
    with largest_file(500):
        readers = open_texts(streams_of("", None, folder), TOKENIZER)
        shards = TokenShards(readers, TOKENIZER, warnings.append)
        assert all_tokens(shards) == EXPECTED
    assert not kept(folder)
    (line,) = warnings
    assert "cannot be written (File too large)" in line
    assert "set XDG_CACHE_HOME to a folder on another disk" in line


def test_openers_share_the_work(folder, monkeypatch):
    made = []
    make = TokenShards._tokenized
    monkeypatch.setattr(
        TokenShards,
        "_tokenized",
        lambda shards, number: made.append(number) or make(shards, number),
    )
    with ThreadPoolExecutor(
        3
    ) as pool:  # a lock is of an open file: threads are no different from processes
        assert list(pool.map(lambda _: all_tokens(opened(folder)), range(3))) == [EXPECTED] * 3
    assert sorted(made) == list(range(len(list(folder.glob("shard*")))))


def test_one_process_makes_a_shard_and_the_others_wait_or_continue(folder):
    shards = opened(folder)
    with module.locked(shards._path(0), wait=True) as is_mine:
        assert is_mine
        assert not shards.prepare(0)
        assert shards.prepare(1)
        waiting = threading.Thread(target=shards.shard, args=(0,))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        assert opened(folder).ready(0) is None
    waiting.join(20)
    assert not waiting.is_alive()
    assert shards.prepare(0)


def test_a_set_elsewhere_is_copied_once(folder, tmp_path):
    cache = tmp_path / "cache"
    assert all_tokens(opened(cache, folder)) == EXPECTED
    assert (
        len(list(cache.glob("shard*")))
        == len(kept(cache, folder))
        == len(list(folder.glob("shard*")))
    )
    assert not kept(folder)
    # The same folder twice is a set that lies here.
    assert all_tokens(opened(folder, folder)) == EXPECTED


def token_shards(folder: Path, *samples: bytes) -> TokenShards:
    return opened(
        write_samples(
            folder / "set", {"tokens": "bytes"}, ({"tokens": sample} for sample in samples)
        )
    )


@pytest.mark.parametrize("sample", [TOO_LARGE, NEGATIVE, b"1234567", b""])
def test_wrong_tokens(tmp_path, sample):
    with user_error("data.damaged", "shard.00000.mds") as caught:
        token_shards(tmp_path, bytes(8), sample).shard(0)
    assert "sample 1 " in str(caught.value)


@pytest.mark.parametrize("name", sorted(path.name for path in STORED.iterdir()))
def test_tokens_of_other_converters(name):
    """LLM Foundry's and ModernBERT's columns, and bytes of every width,
    as MosaicML Streaming stores them.
    """
    assert all_tokens(opened(STORED / name)) == SEQUENCES
    assert [tokens.tolist() for tokens in opened(STORED / name).loose([2, 0])] == [
        SEQUENCES[2],
        SEQUENCES[0],
    ]


@given(
    st.sampled_from(["<i8", "<i4", "<u2"]),
    st.lists(st.lists(st.integers(200, 30_000), min_size=4, max_size=12), min_size=1, max_size=9),
    st.integers(0, 40),
)
def test_the_width_of_tokens_is_found(dtype, sequences, padding):
    values = [np.array([*ids, *[0] * padding], dtype) for ids in sequences]
    stored = [value.tobytes() for value in values]
    assert width_of(stored) == np.dtype(dtype)
    decode = decoder_of("bytes", stored)
    assert [decode(one).tolist() for one in stored] == [value.tolist() for value in values]


def test_a_wrong_id_does_not_change_the_width():
    ids = [101, 2023, 2003, 1 << 40, -100, 102]
    assert width_of([np.array(ids, "<i8").tobytes()]) == np.dtype("<i8")
    assert width_of([]) == width_of([bytes(16)]) == np.dtype("<i8")


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        ("ndarray", b""),
        ("ndarray", b"\x22\x04\x01" + bytes(4)),
        ("ndarray:uint16", b""),
        ("ndarray:uint16", b"\x04\x03" + WORDS[:-1]),
        ("ndarray:uint16", b"\x04\x03"),
        ("ndarray:uint16", b"\x04\x04" + WORDS),
        ("ndarray:uint16", b"\x08\x02\x02" + WORDS + b"\0\0"),
        ("ndarray:uint16", b"\x04\x02\0\0\0\0"),
    ],
    ids=["empty", "floats", "no shape", "cut", "no ids", "another length", "two rows", "padding"],
)
def test_wrong_arrays(tmp_path, encoding, value):
    folder = write_samples(tmp_path / "set", {"input_ids": encoding}, [{"input_ids": value}])
    with user_error("data.damaged", "shard.00000.mds"):
        opened(folder).shard(0)


def test_arrays_of_other_numbers_are_not_tokens(tmp_path):
    write_samples(tmp_path, {"tokens": "ndarray:float32"}, [{"tokens": b"\x04\x01" + bytes(4)}])
    with user_error("data.columns", tmp_path):
        open_texts(streams_of("", None, tmp_path), TOKENIZER)


def test_masked_samples_are_no_texts():
    folder = STORED.parent / "enwiki_bytes_zstd"
    with user_error("data.columns", folder, wording=False):
        open_texts(streams_of("", None, folder), TOKENIZER)


def test_tokens_of_another_vocabulary(tmp_path):
    """The set records its vocabulary; one that does not is read with any tokenizer."""
    lines = [*SPECIAL_TOKENS, "the", "river"]
    files = {"mine": lines, "same": lines, "other": [*SPECIAL_TOKENS, "river", "the"]}
    for name, entries in files.items():
        end = "\r\n" if name == "same" else "\n"
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.txt").write_text(end.join(entries), newline="")
    mine, same, other = (load_tokenizer(tmp_path / name) for name in files)
    folder = write_samples(
        tmp_path / "set",
        {"tokens": "bytes"},
        [{"tokens": np.array([2, 5, 6, 3], "<i8").tobytes()}],
        vocabulary_sha256=vocabulary_sha256(mine),
    )
    assert same.sha256 != mine.sha256
    for tokenizer in (mine, same):
        assert all_tokens(opened(folder, tokenizer=tokenizer)) == [[2, 5, 6, 3]]
    streams = streams_of("", None, folder)
    for read in (describe_text, open_texts):
        with user_error("vocabulary.mismatch", folder):
            read(streams, other)
    with user_error("vocabulary.mismatch", folder):
        opened(tmp_path / "copy", folder, tokenizer=other)
    index = json.loads((folder / "index.json").read_bytes())
    (folder / "index.json").write_text(json.dumps({**index, "vocabulary_sha256": "?"}))
    with user_error("file.json", folder / "index.json"):
        opened(folder)
    del index["vocabulary_sha256"]
    (folder / "index.json").write_text(json.dumps(index))
    assert all_tokens(opened(folder, tokenizer=other)) == [[2, 5, 6, 3]]


def test_a_set_without_texts(tmp_path):
    write_samples(tmp_path, {"image": "bytes", "label": "str"}, [{"image": b"", "label": "3"}])
    with user_error("data.columns", tmp_path):
        open_texts(streams_of("", None, tmp_path), TOKENIZER)


@pytest.mark.parametrize("damage", ["text", "size"])
def test_a_damaged_text_is_named(tmp_path, damage):
    folder = write_texts(tmp_path / "set", ["one", "two “quoted”", "three"], hashes=())
    path = folder / "shard.00000.mds"
    old, new = {
        "text": ("“".encode(), b"\xff\xfe\xfd"),
        "size": (b"\x03\0\0\0one", b"\x02\0\0\0one"),
    }[damage]
    path.write_bytes(path.read_bytes().replace(old, new))
    with user_error("data.damaged", path):
        opened(folder).shard(0)


def test_a_text_among_other_columns(tmp_path):
    samples = (
        {"text": text, "url": "u", "number": bytes(number)} for number, text in enumerate(TEXTS)
    )
    folder = write_samples(
        tmp_path / "set", {"text": "str", "url": "str", "number": "bytes"}, samples
    )
    assert all_tokens(opened(folder)) == EXPECTED
