"""The evaluation set is the published pick, in order."""

from __future__ import annotations

from mlbert.data.formats.prepared import ShardSet
from mlbert.data.formats.ragged import Ragged
from mlbert.data.prepare.shuffle import make_eval_set
from stored_sets import make_rows, names, random_lengths, tree, write_set
from user_errors import user_error


def test_examples_are_evenly_picked_in_order(tmp_path):
    rows = make_rows(random_lengths(103))
    source = write_set(tmp_path / "source", rows)
    manifest = make_eval_set(source, tmp_path / "out", num=40)
    (picked,) = ShardSet.open(tmp_path / "out", verify=True)
    assert names(picked) == [names(rows)[int(i * 103 / 40)] for i in range(40)]
    assert manifest.num_sequences == 40
    before = tree(tmp_path / "out")
    make_eval_set(source, tmp_path / "out", num=40)
    assert tree(tmp_path / "out") == before
    with user_error("prepare.other-options", tmp_path / "out"):
        make_eval_set(source, tmp_path / "out", num=41)


def test_all_of_them_and_too_many(tmp_path):
    rows = make_rows(random_lengths(20))
    source = write_set(tmp_path / "source", rows)
    make_eval_set(source, tmp_path / "all", num=20)
    assert names(Ragged.concatenate(list(ShardSet.open(tmp_path / "all")))) == names(rows)
    with user_error("config.range", "--num"):
        make_eval_set(source, tmp_path / "more", num=21)
