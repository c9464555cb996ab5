"""What names files without a manifest: the same wherever they lie, another where one is another."""

import hashlib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from host_batches import numbers, open_packed
from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.checksums import CHECKSUMS
from mlbert.data.formats.open import check_same_vocabulary, describe, open_store, widths_at_most
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.tfrecord_plain import Widths
from mlbert.data.loading.packed import PackedSource
from mlbert.data.loading.pretraining import EvalSet
from mlbert.data.prepare.export_nvidia import export_nvidia
from mlbert.data.prepare.verify import verify
from programs import write_files
from random_set import random_rows
from stored_sets import VOCAB_SIZE, flip, make_rows, random_lengths, write_set
from tfrecord_examples import write_parts
from user_errors import user_error

COUNT = 40


@pytest.fixture(params=["tfrecord", "nvidia"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, own_cache: Path) -> Path:
    rows = make_rows(random_lengths(COUNT))
    if request.param == "tfrecord":
        return write_parts(
            tmp_path / "set", *(rows.take(half) for half in np.split(np.arange(COUNT), 2))
        )
    export_nvidia(
        write_set(tmp_path / "source", rows), tmp_path / "set", layout="fixed", num_files=2
    )
    return tmp_path / "set"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return write_parts(tmp_path / "records", random_rows(90))


def test_names_and_sizes_until_somebody_hashes_the_files(folder: Path, tmp_path: Path) -> None:
    before = describe(folder).known_as
    assert re.fullmatch("names-and-sizes:sha256:[0-9a-f]{64}", before)
    verify([folder])
    assert not list(folder.glob(".*"))
    after = describe(folder).known_as
    files = sorted(path for path in folder.iterdir() if path.name != CHECKSUMS)
    lines = "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files
    )
    assert after == f"content:sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
    moved = folder.rename(tmp_path / "elsewhere")
    assert describe(moved).known_as == after
    copy = shutil.copytree(moved, tmp_path / "copy", copy_function=shutil.copyfile)  # other times
    assert describe(copy).known_as == before


def test_a_change_is_another_identity(folder: Path, own_cache: Path) -> None:
    verify([folder])
    kept = describe(folder).known_as
    path = min(folder.glob("part*"))
    content = path.read_bytes()
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    flip(path)
    assert describe(folder).known_as.startswith("names-and-sizes:")
    path.write_bytes(content)
    os.utime(path, ns=times)
    assert describe(folder).known_as == kept
    (digest,) = own_cache.glob("mlbert/content/*")
    digest.write_text("0" * 63)
    assert describe(folder).known_as.startswith("names-and-sizes:")


def test_another_name_or_size_is_another_identity(folder: Path) -> None:
    names = [describe(folder).known_as]
    for path in list(folder.glob("part*")):
        path.rename(
            path.with_name(f"b{path.name}" if path.suffix else path.name.removesuffix("-of-00002"))
        )
    names.append(describe(folder).known_as)
    longer = min(folder.iterdir())
    if longer.suffix != ".hdf5":  # an HDF5 file says how long it is
        longer.write_bytes(longer.read_bytes() + b"x")
        names.append(describe(folder).known_as)
    assert len(set(names)) == len(names)


def test_a_cache_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    (report,) = verify([folder])
    assert not report.problems
    assert describe(folder).known_as.startswith("names-and-sizes:")


def test_no_record_is_read_before_a_set_is_opened(records: Path) -> None:
    (path,) = records.iterdir()
    most = Widths(32, 5)
    known = describe(records, most)
    content = path.read_bytes()
    path.write_bytes(bytes(len(content)))
    assert describe(records, most) == known
    common = {"max_sequences_per_pack": 1, "vocab_size": VOCAB_SIZE, "most": most}
    source = PackedSource(records, packs_per_step=4, seed=1, partition=contiguous, **common)
    for one in (source, EvalSet(records, 10, 4, **common)):
        with user_error("data.damaged", path):
            one.open()


def test_records_wider_than_expected(records: Path) -> None:
    for most, setting in (
        (Widths(16, 5), "MAX_SEQ_LENGTH=32"),
        (Widths(32, 4), "MAX_PREDICTIONS_PER_SEQ=5"),
    ):
        with user_error("config.conflict", records) as caught:
            EvalSet(records, 10, 4, max_sequences_per_pack=1, most=most).open()
        assert setting in str(caught.value)


def test_the_widths_of_the_benchmark() -> None:
    for positions, widths in ((512, (512, 76)), (128, (128, 20)), (32, (32, 5))):
        shape = BertConfig(100, 16, 1, 2, 32, max_position_embeddings=positions)
        assert widths_at_most(None, None, shape) == widths
        assert widths_at_most(16, 7, shape) == (16, 7)


def test_a_prepared_set(make_set):
    info = describe(make_set(50))
    assert open_store(info.folder).info == info
    assert (info.kind, info.num_sequences, info.vocab_size, info.max_pack_tokens) == (
        "mlbert",
        50,
        VOCAB_SIZE,
        None,
    )
    assert info.identity == hashlib.sha256((info.folder / "manifest.json").read_bytes()).hexdigest()


def test_records_train_and_evaluate(records):
    info = describe(records)
    assert (info.kind, info.vocab_size) == ("tfrecord", None)
    source = open_packed(records, 1, vocab_size=VOCAB_SIZE)
    seen = [
        n
        for step in range(source.steps_per_epoch)
        for batch in source.batches_of(step)
        for n in numbers(batch)
    ]
    assert sorted(seen) == list(range(90))
    evaluation = EvalSet(records, 60, 4, max_sequences_per_pack=3, vocab_size=VOCAB_SIZE)
    evaluation.open()
    assert sorted(n for batch in evaluation for n in numbers(batch)) == list(range(60))


def test_token_ids_beyond_the_models_vocabulary_are_refused(records):
    source = open_packed(records, 5, seed=0, max_tokens=512, vocab_size=100)
    with user_error("data.model-mismatch", records):
        source.batches_of(0)
    with user_error("data.model-mismatch", records):
        EvalSet(records, 90, 4, max_sequences_per_pack=3, vocab_size=100).open()


def test_a_folder_that_is_not_a_set(tmp_path, make_set):
    write_files(tmp_path, {"empty/notes.txt": "hello"})
    make_set(5, name="instances")
    make_set(5, name="packed")
    for folder, code in (
        ("empty", "data.missing"),
        ("absent", "file.missing"),
        (".", "data.format"),
    ):
        for look in (describe, open_store):
            with user_error(code, tmp_path / folder):
                look(tmp_path / folder)


def test_unknown_vocabularies_agree_with_any(make_set):
    known = describe(make_set(5))
    unknown = replace(known, vocabulary_sha256=None)
    check_same_vocabulary(known, unknown)
    check_same_vocabulary(unknown, known)
    with user_error("vocabulary.mismatch", "set"):
        check_same_vocabulary(known, replace(known, vocabulary_sha256="0" * 64))
