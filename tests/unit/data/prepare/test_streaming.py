"""Conversion to MDS sets: what is in the splits, concatenation, the hub's absence,
bad files, interruption.
"""

import dataclasses
import functools
import gzip
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.mds import MdsReader, MdsWriter
from mlbert.data.formats.mds_tokens import decoder_of
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare import streaming
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.shares import Share
from mlbert.data.prepare.step_tasks import ShareDone
from mlbert.data.prepare.streaming import (
    Concatenation,
    WholeTexts,
    convert,
    convert_files,
    hub_texts,
    own_texts,
    read_texts,
)
from programs import write_files
from stored_sets import tree
from text_sets import json_lines
from user_errors import user_error

TOKENIZER = load_tokenizer("bert-base-uncased")
TEXTS = [f"Text {number} of the river.\nIts second line." for number in range(300)]


def texts_of(part: str) -> Iterator[str]:
    return iter([f"{part} {number} by the river" for number in range(30)])


def in_set(folder: Path, column: str = "text") -> list:
    return [sample[column] for sample in MdsReader(folder, folder)]


@pytest.fixture
def lines_file(tmp_path: Path) -> Path:
    return write_files(tmp_path, {"texts.jsonl": json_lines(TEXTS, url="u")}) / "texts.jsonl"


def test_own_text_is_parted_by_content(lines_file, tmp_path, said):
    out = tmp_path / "out"
    splits = ["train", "val", "train_small"]
    executor = Executor(progress=said)
    convert(own_texts(lines_file), splits, out, tokenizer=TOKENIZER, executor=executor)
    train = in_set(out / "train")
    val = in_set(out / "val")
    assert sorted(train + val) == sorted(TEXTS)
    assert 1 <= len(val) <= 15
    assert in_set(out / "train_small") == train
    assert sorted(path.name for path in out.iterdir()) == ["train", "train_small", "val"]
    assert MdsReader(out / "val").columns == {"text": "str"}
    assert MdsReader(out / "val").vocabulary_sha256 is None
    assert f"train: {len(train)} samples" in said.lines
    assert "val: truncation to 128 tokens drops 0.0% of the tokens" in "".join(said.lines)


def test_truncation_drops_the_rest(tmp_path, said):
    texts = ["river " * 252, "river " * 126, ""]
    convert(
        lambda part: iter(texts),
        ["val"],
        tmp_path,
        tokenizer=TOKENIZER,
        executor=Executor(progress=said),
    )
    assert (
        "drops 33.3% of the tokens and the ends of 33.3% of the texts (the first 3)"
        in said.lines[-1]
    )


def test_small_splits_are_the_beginning_of_the_large_ones(tmp_path, monkeypatch):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    monkeypatch.setitem(streaming.SPLITS, "val_small", ("val", 4))
    (tmp_path / "val").mkdir()  # an empty folder is not a split
    convert(texts_of, ["val", "val_small"], tmp_path, tokenizer=TOKENIZER, compression="zstd:7")
    assert [path.name for path in (tmp_path / "val").glob("shard*")] == ["shard.00000.mds.zstd"]
    assert in_set(tmp_path / "val") == [*texts_of("val")]
    assert in_set(tmp_path / "val_small") == list(texts_of("val"))[:4]


def concatenated(folder: Path, texts: list[str], **options) -> list[list[int]]:
    defaults = {"tokens": 8, "bos_text": "", "eos_text": "", "wrap": True}
    how = Concatenation(**(defaults | options))
    convert(lambda part: iter(texts), ["val"], folder, tokenizer=TOKENIZER, form=how)
    assert MdsReader(folder / "val").vocabulary_sha256 == file_sha256(TOKENIZER.file)
    return [np.frombuffer(sample, "<i8").tolist() for sample in in_set(folder / "val", "tokens")]


def ids(text: str) -> list[int]:
    return [101, *TOKENIZER.encode(text), 102]


@pytest.mark.parametrize("together", [1, 2, 256])
def test_concatenated(tmp_path, monkeypatch, together):
    monkeypatch.setattr(streaming, "TOGETHER", together)
    texts = ["the river by the bridge", "a kitchen", "", "unaffable naïve"]
    joined = list(itertools.chain.from_iterable(map(ids, texts)))
    found = concatenated(tmp_path / "wrap", texts)
    assert all(len(sample) == 8 for sample in found)
    assert list(itertools.chain.from_iterable(found)) == joined[: len(joined) // 8 * 8]
    cut = [ids(texts[0])[:6], (ids(texts[1]) + ids(""))[:6], ids(texts[3])[:6]]
    assert concatenated(tmp_path / "no_wrap", texts, wrap=False, tokens=6) == cut
    marked = concatenated(
        tmp_path / "marked", ["river"], bos_text="[MASK]", eos_text="the the", tokens=6
    )
    assert marked == [[103, 101, TOKENIZER.vocabulary["river"], 102, *TOKENIZER.encode("the the")]]


@pytest.mark.parametrize(
    "form",
    [None, WholeTexts(), Concatenation(16, "", "of", True), Concatenation(16, "", "of", False)],
    ids=["texts", "whole", "wrap", "no_wrap"],
)
@given(
    st.lists(st.integers(0, 60), min_size=30, max_size=60),
    *(st.integers(low, high) for low, high in ((1, 6), (1, 4), (300, 1500), (0, 999))),
)
@settings(max_examples=3)
def test_shares_make_the_bytes_of_one_process(
    tmp_path_factory, form, lengths, files, count, limit, seed
):
    folder = tmp_path_factory.mktemp("shares")
    draw = random.Random(seed)
    texts = [f"{number} " + "the river of " * length for number, length in enumerate(lengths)]
    edges = sorted([0, *draw.choices(range(len(texts) + 1), k=files - 1), len(texts)])
    (folder / "texts").mkdir()
    for number, (first, end) in enumerate(itertools.pairwise(edges)):
        lines = json_lines(texts[first:end], url="u")
        (folder / "texts" / f"{number}.json.gz").write_bytes(gzip.compress(lines.encode()))
    splits = ["train", "train_small", "val"]
    options = {"tokenizer": TOKENIZER, "form": form}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "MdsWriter", functools.partial(MdsWriter, size_limit=limit))
        patch.setattr(streaming, "GROUP", draw.choice([1, 1000, 1 << 20]))
        patch.setattr(streaming, "VAL_SHARE", 1 / 4)
        patch.setattr(streaming, "TOGETHER", draw.choice([1, 7, 256]))
        patch.setitem(streaming.SPLITS, "train_small", ("train", draw.randrange(5, 60)))
        convert(own_texts(folder / "texts"), splits, folder / "one", **options)
        convert_files(folder / "texts", splits, folder / "pool", **options)
        for index in draw.choices(range(count), k=3) + [*range(count)] * 2:
            share = Share(index, count, merges=False)
            with pytest.raises(ShareDone):
                convert_files(
                    folder / "texts",
                    splits,
                    folder / "shares",
                    **options,
                    executor=Executor(share=share),
                )
        for left in (folder / "shares").glob(".*/.tasks/train"):  # by a killed task
            (left / "shard.00000.mds.1@gone.tmp").touch()
        convert_files(
            folder / "texts",
            splits,
            folder / "shares",
            **options,
            executor=Executor(share=Share.only_merge()),
        )
    assert tree(folder / "shares") == tree(folder / "pool") == tree(folder / "one")


@pytest.mark.parametrize("size", [30_522, 70_000])
def test_whole_texts_are_arrays_of_all_their_ids(tmp_path, size):
    """Of 16 bits, or of 32 if the vocabulary is larger."""
    tokenizer = load_tokenizer("bert-base-uncased")
    larger = {f"[more{number}]": number for number in range(30_522, size)}
    tokenizer = dataclasses.replace(tokenizer, vocabulary={**tokenizer.vocabulary, **larger})
    texts = ["the river", "", "the bridge " * 400, "unaffable naïve"]
    convert(lambda part: iter(texts), ["val"], tmp_path, tokenizer=tokenizer, form=WholeTexts())
    reader = MdsReader(tmp_path / "val")
    dtype = "uint16" if size < 1 << 16 else "uint32"
    assert reader.columns == {"id": "str", "input_ids": f"ndarray:{dtype}", "len": "int"}
    assert reader.vocabulary_sha256 is not None
    expected = [ids(text) for text in texts]
    decode = decoder_of(f"ndarray:{dtype}", [])
    assert [decode(sample["input_ids"]).tolist() for sample in reader] == expected
    assert [int.from_bytes(sample["len"], "little") for sample in reader] == [
        len(text) for text in expected
    ]
    assert len({sample["id"] for sample in reader}) == len(texts)


def test_a_split_of_an_interrupted_run_with_other_options_is_not_kept(lines_file, tmp_path):
    def run(lower_case: bool) -> None:
        tokenizer = load_tokenizer("bert-base-uncased", lower_case)
        convert_files(lines_file, ["train", "val"], tmp_path / "out", tokenizer=tokenizer)

    rename = mock.Mock(wraps=os.rename, side_effect=[mock.DEFAULT, KeyboardInterrupt])
    with mock.patch.object(streaming.os, "rename", rename), pytest.raises(KeyboardInterrupt):
        run(lower_case=True)
    with user_error("file.exists", tmp_path / "out" / "train"):
        run(lower_case=False)
    run(lower_case=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "val"]


def test_texts_that_fill_no_sample(tmp_path):
    for texts, how in (([], None), (["river"], Concatenation(512, "", "", True))):
        with user_error("data.too-small", "split val"):
            convert(
                lambda part, texts=texts: iter(texts),
                ["val"],
                tmp_path,
                tokenizer=TOKENIZER,
                form=how,
            )
        assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["val/index.json", "val/shard.00000.mds", "val"])
def test_a_split_that_is_there(tmp_path, there):
    write_files(tmp_path, {there: ""})
    with user_error("file.exists", tmp_path / "val"):
        convert(texts_of, ["train", "val"], tmp_path, tokenizer=TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["val"]


def test_text_files(tmp_path):
    files = {
        "b/a.txt": "\ufeff\n\nfirst\nits second line  \n\n \nsecond\r\n",
        "other.md": "no text",
    }
    folder = write_files(tmp_path, files | {"a.json": '{"text": "zeroth"}\n\n{"text": " "}\n'})
    (folder / "c.jsonl").write_text(r'{"text": "a\ud800b \ud83d\ude00"}')  # half a surrogate
    found = [text for part in ("train", "val") for text in own_texts(folder)(part)]
    assert sorted(found) == ["a?b 😀", "first\nits second line", "second", "zeroth"]


@given(
    st.lists(
        st.text(st.characters(blacklist_categories=["Cs"]), min_size=1).filter(str.strip),
        max_size=6,
    )
)
def test_any_text_comes_back(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("lines")
    (folder / "texts.jsonl").write_text(json_lines(texts, url="u"))
    table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())})
    parquet.write_table(table, folder / "texts.parquet", row_group_size=2)
    assert [[*read_texts(path)] for path in sorted(folder.iterdir())] == [texts, texts]


def test_bad_files(tmp_path):
    write_files(
        tmp_path, {"a.jsonl": '{"text": "a"}\n{"body": "b"}\n', "a.md": "a", "folder/a.md": "a"}
    )
    (tmp_path / "a.txt").write_bytes(b"a\nb\xff\n")
    for name, code, words in (
        ("a.jsonl", "data.row", "line 2 "),
        ("a.txt", "data.encoding", "line 2 "),
        ("a.md", "data.format", ""),
        ("folder", "data.empty", ""),
        ("none", "file.missing", ""),
    ):
        with user_error(code, tmp_path / name) as caught:
            convert(own_texts(tmp_path / name), ["train"], tmp_path / "out", tokenizer=TOKENIZER)
        assert words in str(caught.value)
        assert not (tmp_path / "out" / "train").exists()


def test_compressed_files(lines_file, tmp_path):
    zstandard = pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    compress = zstandard.ZstdCompressor().compress
    packed = tmp_path / "c4.json.zst"
    half = lines_file.stat().st_size // 2
    content = lines_file.read_bytes()
    packed.write_bytes(compress(content[:half]) + compress(content[half:]))  # two frames
    assert [*read_texts(packed)] == TEXTS
    packed.write_bytes(packed.read_bytes()[:-3])
    with user_error("data.damaged", packed):
        list(read_texts(packed))


def test_what_a_killed_conversion_left_is_no_split(tmp_path):
    partial = tmp_path / ".val.partial"

    def texts(part: str) -> Iterator[str]:
        assert [path.name for path in tmp_path.iterdir()] == [partial.name]
        assert not any(partial.iterdir())
        yield from texts_of(part)

    write_files(partial, {"shard.00007.mds": "left"})
    convert(texts, ["val"], tmp_path, tokenizer=TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["val"]
    assert in_set(tmp_path / "val") == [*texts_of("val")]


def test_rows_of_the_hub_and_no_network(monkeypatch):
    datasets = pytest.importorskip("datasets")
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    with user_error("network.unreachable", "dataset c4"):
        hub_texts("c4", "en")
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        yield from ({"text": "one"}, {"text": "two"})
        raise ConnectionError("gone\naway")

    monkeypatch.setattr(streaming, "hub_problem", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = hub_texts("c4", None)("val")
    assert [next(rows), next(rows)] == ["one", "two"]
    with user_error("network.unreachable", "dataset c4"):
        next(rows)
    assert asked == [(("allenai/c4", "en"), {"split": "validation", "streaming": True})]
