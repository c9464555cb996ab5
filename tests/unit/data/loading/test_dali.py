"""DALI's reader against ours: the same sequences and the same batches."""

import sys
from pathlib import Path

import numpy as np
import pytest

from host_batches import assert_same
from mlbert.data.formats import tfrecord
from mlbert.data.formats.order import contiguous
from mlbert.data.formats.padded import NAMES, Widths, padded
from mlbert.data.formats.tfrecord import write_examples
from mlbert.data.loading import dali
from mlbert.data.loading.packed import PackedSource
from random_set import random_rows
from stored_sets import assert_same_rows
from tfrecord_examples import write_parts
from user_errors import user_error


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path) -> Path:
    tfrecord.codec()  # compiled before: its library is in the cache, too
    rows = random_rows(120)
    return write_parts(tmp_path / "set", rows.slice(0, 50), rows.slice(50, 120))


@pytest.fixture
def with_dali() -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed (the nvidia-dali extra)")


@pytest.mark.usefixtures("with_dali")
def test_gives_the_same_batches(folder, monkeypatch):
    monkeypatch.setattr(dali, "_BATCH", 16)
    options = {"packs_per_step": 2, "max_sequences_per_pack": 3, "seed": 3, "rank": 1, "world_size": 2}
    options["partition"] = contiguous
    plain, other = PackedSource(folder, **options), dali.DaliSource(folder, **options)
    plain.open()
    other.open()
    other.load_state_dict({**plain.state_dict(), "step": 4})
    for expected, found in zip(plain.batches_of(4), other.next_step(), strict=True):
        assert_same(found.to("cpu"), expected.to("cpu"))
    other.close()


@pytest.mark.usefixtures("with_dali")
def test_record_that_changed_after_opening(folder):
    store = dali.DaliStore(folder)
    write_examples(folder / "part-00001-of-00002", random_rows(120, seed=5).slice(0, 70), 32, 5)
    with user_error("data.damaged", folder, wording=False):
        store.gather(np.arange(120))


def test_without_dali(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali.fn", None)
    with user_error("package.missing", "nvidia-dali"):
        dali.DaliStore(folder)


def test_removes_padding_unless_a_value_is_not_allowed():
    lists = {name: padded(random_rows(20), name, Widths(32, 5)) for name in NAMES}
    lists = {name: values.astype(np.float32 if "weights" in name else np.int64) for name, values in lists.items()}
    assert_same_rows(dali._without_padding(lists), random_rows(20))
    lists["input_ids"][7, 0] = 65_536
    assert dali._without_padding(lists) is None
