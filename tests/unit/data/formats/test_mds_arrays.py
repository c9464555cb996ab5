"""Sets of whole documents as arrays of ids: as MosaicML Streaming writes them, read in place."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_samples import write_samples
from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.mds_arrays import stored_tokens
from mlbert.data.formats.mds_tokens import array_header_bytes, decoder_of, encode_array
from mlbert.data.formats.streams import streams_of
from mlbert.data.formats.token_shards import TokenShards, open_texts
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.loading.masked_text import SPLIT, TextEvalSet, TextSet, TextSource
from mlbert.data.loading.text_lanes import Pieces
from stored_sets import tree
from user_errors import user_error

TOKENIZER = load_tokenizer("bert-base-uncased")
SETS = sorted((Path(__file__).parents[3] / "assets/mds/documents").iterdir())
LENGTHS = [3, 5, 255, 256, 40, 300, 700, 9, 2, 100]
TYPES = ["uint16", "int16", "uint32", "int32", "uint64", "int64"]
LENGTH = 64
pytestmark = pytest.mark.usefixtures("own_cache")


def decoded(reader: MdsReader, column: str) -> list[list[int]]:
    """Decode the samples one by one: the slow reference."""
    values = [sample[column] for sample in reader]
    decode = decoder_of(reader.columns[column], values)
    return [decode(value).tolist() for value in values]


def in_place(reader: MdsReader, column: str, pad_id: int | None = None) -> list[list[int]] | None:
    texts = []
    for number, size in enumerate(reader.shard_sizes.tolist()):
        found = stored_tokens(reader, number, column, pad_id)
        if found is None:
            return None
        texts += [found.text(place).tolist() for place in range(size)]
    return texts


@pytest.mark.parametrize("folder", SETS, ids=lambda folder: folder.name)
def test_sets_of_streaming_are_read_in_place(folder, tmp_path):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    reader = MdsReader(folder)
    expected = decoded(reader, "input_ids")
    assert [len(ids) for ids in expected] == LENGTHS
    assert in_place(reader, "input_ids") == expected
    for address in (str(folder), folder.as_uri()):
        local = tmp_path / address.partition(":")[0].replace("/", "_")
        (opened,) = open_texts(streams_of("", None, local, address), TOKENIZER)
        shards = TokenShards([opened], TOKENIZER)
        texts = np.arange(len(LENGTHS))
        tokens, offsets = Pieces(shards, TOKENIZER, 700).rows(texts, np.zeros_like(texts))
        assert [row.tolist() for row in np.split(tokens, offsets[1:-1])] == expected
        assert not [*local.rglob("*.ids")]


@pytest.mark.parametrize("folder", SETS, ids=lambda folder: folder.name)
def test_written_sets_are_byte_equal_to_those_of_streaming(folder, tmp_path):
    pytest.importorskip("zstandard", reason="the streaming extra is not installed")
    index = json.loads((folder / "index.json").read_bytes())["shards"]
    options = {name: index[0][name] for name in ("size_limit", "compression", "hashes")}
    reader = MdsReader(folder)
    samples = []
    for sample, ids in zip(reader, decoded(reader, "input_ids"), strict=True):
        sample["input_ids"] = np.array(ids)
        if "len" in sample:
            sample["len"] = int.from_bytes(sample["len"], "little", signed=True)
            assert sample["len"] == len(ids)
        samples.append(sample)
    written = write_samples(tmp_path / "set", reader.columns, samples, **options)
    if options["compression"] is None:
        assert tree(written) == tree(folder)
        return
    # The compressed bytes depend on the version of Zstandard.
    found = json.loads((written / "index.json").read_bytes())["shards"]
    assert [shard["raw_data"] for shard in found] == [shard["raw_data"] for shard in index]


@st.composite
def array_sets(draw: st.DrawFn) -> tuple[dict[str, str], list[dict[str, object]]]:
    dtype = draw(st.sampled_from(TYPES))
    others = {"a": "str", "b": "int", "x": "bytes", "z": "int"}
    columns = {name: others[name] for name in draw(st.sets(st.sampled_from(sorted(others))))}
    most = min(np.iinfo(dtype).max, 40_000)
    texts = st.lists(st.integers(0, most), min_size=1, max_size=300)
    values = {
        "str": st.text("añb", max_size=5),
        "int": st.integers(-5, 1 << 40),
        "bytes": st.binary(max_size=5),
    }
    row = {"input_ids": texts.map(lambda ids: np.array(ids, dtype))}
    row |= {name: values[encoding] for name, encoding in columns.items()}
    samples = draw(st.lists(st.fixed_dictionaries(row), min_size=1, max_size=8))
    return {**columns, "input_ids": f"ndarray:{dtype}"}, samples


@settings(max_examples=25)
@given(array_sets(), st.sampled_from([None, 0, 7]))
def test_in_place_equals_decoding(case, pad_id):
    columns, samples = case
    with TemporaryDirectory() as folder:
        reader = MdsReader(write_samples(Path(folder), columns, samples, size_limit=900))
        expected = [sample["input_ids"].tolist() for sample in samples]
        assert decoded(reader, "input_ids") == expected
        for ids in expected:
            while pad_id is not None and ids and ids[-1] == pad_id:
                ids.pop()
        found = in_place(reader, "input_ids", pad_id)
        # A text of padding only is left to the decoder, which names it.
        assert found == (expected if all(expected) else None)


def test_ids_outside_the_vocabulary_are_named_when_they_are_used(tmp_path):
    good = np.array([101, 2023, 102])
    for number, wrong in enumerate([np.array([101, 30_522, 102]), np.array([101, -1, 102])]):
        folder = write_samples(
            tmp_path / str(number),
            {"input_ids": "ndarray:int32"},
            [{"input_ids": good}, {"input_ids": wrong}],
        )
        shards = TokenShards(open_texts(streams_of("", None, folder), TOKENIZER), TOKENIZER)
        shards.shard(0)
        pieces = Pieces(shards, TOKENIZER, 8)
        assert pieces.rows(np.array([0]), np.array([0]))[0].tolist() == good.tolist()
        with user_error("data.damaged", "shard.00000.mds") as caught:
            pieces.rows(np.array([0, 1]), np.array([0, 0]))
        assert "sample 1 " in str(caught.value)


def test_a_damaged_sample_is_named(tmp_path):
    folder = tmp_path / "set"
    shutil.copytree(SETS[0].parent / "int32_alone", folder)
    path = folder / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    place = content.index(b"\x04\x03" + np.array([101], "<i4").tobytes())
    content[place + 1] = 4  # the length in the shape
    path.write_bytes(content)
    assert stored_tokens(MdsReader(folder), 0, "input_ids", None) is None
    with user_error("data.damaged", "shard.00000.mds", wording=False):
        TokenShards(open_texts(streams_of("", None, folder), TOKENIZER), TOKENIZER).shard(0)


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    draw = np.random.default_rng(0)
    lengths = [1, LENGTH - 1, LENGTH, LENGTH + 1, 5 * LENGTH, *draw.integers(2, 400, 40)]
    texts = [draw.integers(1000, 30_000, length) for length in lengths]
    samples = [{"input_ids": ids, "len": len(ids), "id": str(n)} for n, ids in enumerate(texts)]
    columns = {"input_ids": "ndarray:uint16", "len": "int", "id": "str"}
    folder = write_samples(tmp_path / "documents", columns, samples, size_limit=4096)
    return folder, [ids.tolist() for ids in texts]


def sequences(batches) -> list[list[int]]:
    """Return every sequence as it was before masking."""
    found = []
    for batch in batches:
        on_device = batch.to("cpu")
        ids = on_device.input_ids.clone()
        ids[on_device.masked_positions] = on_device.masked_labels
        ends = on_device.cu_seqlens[1:-1]
        found += [row.tolist() for row in ids.tensor_split(ends.long())]
    return found


@pytest.mark.parametrize("packed", [1, 4])
def test_long_documents_lose_no_token(documents, packed):
    """Every document is in pieces of at most LENGTH tokens, which make it up again."""
    folder, texts = documents
    in_pieces = [
        text[start : start + LENGTH] for text in texts for start in range(0, len(text), LENGTH)
    ]
    several = TextSet(streams_of("", None, folder), TOKENIZER, LENGTH, SPLIT)
    evaluation = TextEvalSet(several, None, 16, rate=0.3, seed=1)
    evaluation.open()
    assert sequences(evaluation) == in_pieces

    options = {"shuffle": "py1s", "shuffle_seed": 1, "canonical_nodes": 1}
    source = TextSource(
        several, sequences_per_step=1, packed=packed, rate=lambda step: 0.3, seed=1, **options
    )
    source.open()
    steps = [source.batches_of(step) for step in range(len(in_pieces))]
    source.close()
    read = [row for step in steps for row in sequences(step)][: len(in_pieces)]
    assert sum(map(len, read)) == sum(map(len, texts))
    assert sorted(read) == sorted(in_pieces)


@pytest.mark.parametrize("length", [1, 255, 256, 65_535, 65_536])
def test_the_header_of_a_value_is_as_wide_as_expected(length):
    value = encode_array(np.zeros(length, np.uint16), "ndarray:uint16")
    assert len(value) == array_header_bytes(np.asarray([length])) + 2 * length
