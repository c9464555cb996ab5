"""Input that no program writes: special files, other digits, empty paths,
exchanged and skipped files.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

import nvidia_shards
from mds_samples import write_mds
from mlaudit.logs import read_log
from mlaudit.repeat import remarks
from mlaudit.report.runs import read_systems
from mlaudit.result_set import NAMES, run_file
from mlbert.data.formats.manifest import read_manifest
from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.mds_files import fetch_index
from mlbert.data.formats.prepared import verified_shard
from mlbert.data.formats.tasks import read_columns
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS, load_vocabulary
from mlbert.data.prepare import text_folder
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords
from mlbert.data.prepare.verify import Md5List, verify
from mlbert.data.prepare.wiki_text import read_hashes
from mlbert.host.errors import UserError
from mlbert.host.metrics_file import read_points
from mlbert.host.texts import is_count, parse_number
from mlbert.ops.config import ComputeConfig
from mlbert.programs.custom_corpus.corpus_plan import make_plan, resolve_settings
from mlbert.programs.custom_corpus.own_folder import OwnFolder
from mlbert.runs.step_folders import StepFolders, read_step
from programs import write_files
from stored_sets import make_rows, random_lengths, write_set
from user_errors import user_error

DEMO = Path(__file__).resolve().parents[1] / "assets/own_tree/results/cpu_demo/bert"
LONG = 1 << 40  # bytes, nearly all in a hole; reading them takes many minutes


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("12", int, 12),
        (" -3 ", int, -3),
        ("1e3", float, 1000.0),
        (".5", float, 0.5),
        ("5.", float, 5.0),
    ]
    + [
        (text, float, None)
        for text in ("1_000", "\u0663", "١٦", "nan", "inf", "", "0x10", "1e", "--1", "1 2")
    ]
    + [(text, int, None) for text in ("1_0", "1.5", "1e3", "\u0663", "9" * 5000)],
)
def test_numbers(text: str, kind: type, number: float | None) -> None:
    if number is not None:
        assert parse_number(text, kind) == number
        return
    with pytest.raises(ValueError, match=r"not a number|invalid literal|Exceeds the limit"):
        parse_number(text, kind)
    assert not is_count(text) or len(text) == 5000


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("prepare pack --input in --out", "--out"),
        ("pretrain in --out", "--out"),
        ("prepare verify", "FOLDERS"),
        ("report", "DIR|LOG"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    words: str, name: str, assert_fails: Callable[..., str]
) -> None:
    assert_fails([*words.split(), ""], "config.value", name)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("train.csv", lambda path: read_columns(path, ["text"])),
        ("train.jsonl", lambda path: read_columns(path, ["text"])),
        ("vocab.txt", load_vocabulary),
        ("index.json", lambda path: MdsReader(path.parent)),
        ("index.json", lambda path: fetch_index(str(path.parent), path.parent / "cache")),
        ("list.md5", Md5List.read),
        ("eval.md5", read_hashes),
    ],
    ids=["csv", "jsonl", "vocabulary", "mds index", "fetched index", "md5 list", "hashes"],
)
def test_a_pipe_is_refused(name: str, read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="not a plain file"):  # opening it would block for ever
        read(tmp_path / name)


def _vocabulary(folder: Path) -> Path:
    text = "\n".join([*SPECIAL_TOKENS, "the"])
    (folder / "vocab.txt").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps({"vocabulary_sha256": "0" * 64}))
    return folder / "vocab.txt"


def _nvidia_shard(folder: Path) -> Path:
    return nvidia_shards.write_fixed(folder / "part_00000.hdf5", nvidia_shards.bert_rows(9))


def _second_nvidia_shard(folder: Path) -> Path:
    """Write two shards; the second has a user block and the newest superblock."""
    first = _nvidia_shard(folder)
    second = folder / "part_00001.hdf5"
    with (
        h5py.File(first) as one,
        h5py.File(second, "w", libver="latest", userblock_size=512) as other,
    ):
        for name in one:
            one.copy(name, other)
    return second


def _verify(path: Path) -> None:
    (report,) = verify([path.parent])
    problem = next(
        text for text in report.problems if text.startswith(f"{path}: has {LONG} bytes, ")
    )
    assert report.total("good") < report.total("sequences")
    raise UserError("data.damaged", path, problem.partition(": ")[2], "")


def _prepared_shard(folder: Path) -> Path:
    return sorted(write_set(folder / "set", make_rows(random_lengths(9)), shards=1).glob("*.h5"))[0]


def _tfrecord(folder: Path) -> Path:
    _prepared_shard(folder)
    hdf5_to_tfrecords(folder / "set", folder / "records")
    return sorted((folder / "records").glob("*.tfrecord"))[0]


def _checkpoint(folder: Path) -> Path:
    steps = StepFolders(folder, 1, {})
    made = steps.save(1, {}, lambda place: (place / "tensors").write_bytes(b"x") and None)
    assert steps.load_newest(lambda *_: 1) == (1, [])
    return made / "tensors"


@pytest.mark.parametrize(
    ("make", "read", "code"),
    [
        (_vocabulary, load_vocabulary, "file.too-large"),
        (_vocabulary, load_tokenizer, "file.too-large"),
        (_nvidia_shard, lambda path: verify([path.parent]), "data.damaged"),
        (_second_nvidia_shard, _verify, "data.damaged"),
        (_prepared_shard, _verify, "data.damaged"),
        (_tfrecord, _verify, "data.damaged"),
        (
            _prepared_shard,
            lambda path: verified_shard(read_manifest(path.parent), 0),
            "data.damaged",
        ),
        (_checkpoint, lambda path: read_step(path.parent), "checkpoint.damaged"),
        (
            lambda folder: write_files(folder, {"metrics.jsonl": ""}) / "metrics.jsonl",
            read_points,
            "file.too-large",
        ),
    ],
    ids=[
        "vocabulary",
        "tokenizer",
        "nvidia shard",
        "second nvidia shard",
        "prepared shard",
        "tfrecord",
        "verified shard",
        "checkpoint",
        "metrics",
    ],
)
def test_a_lengthened_file_is_refused_before_it_is_hashed(
    make: Callable[[Path], Path], read: Callable[[Path], object], code: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    os.truncate(path, LONG)
    with user_error(code, wording=code == "file.too-large"):
        read(path)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_flipped_byte_of_an_mds_set_is_found(tmp_path: Path, compression: str | None) -> None:
    rows = nvidia_shards.bert_rows(60, max_length=32)
    folder = write_mds(tmp_path / "set", rows, predictions=6, compression=compression)
    (whole,) = verify([folder])
    masked = np.diff(rows.masked_offsets) > 0
    assert (whole.total("sequences"), whole.total("good")) == (60, masked.sum())
    shard = sorted(folder.glob("shard.*"))[-1]
    content = bytearray(shard.read_bytes())
    content[-20] ^= 1
    shard.write_bytes(content)
    other = write_mds(tmp_path / "other", rows, predictions=6)
    damaged, good = verify([folder, other])
    assert (damaged.total("good"), damaged.total("sequences")) == (0, 60)
    assert good.total("good") == masked.sum()  # sets named after a damaged one are read
    assert f"{shard}: has a different sha1 from the one in the index" in damaged.problems[0]


def test_an_exchanged_vocabulary_is_refused(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    config = tmp_path / "tokenizer_config.json"
    vocabulary.write_text("\n".join([*SPECIAL_TOKENS, "the", "a"]))
    config.write_text(json.dumps({"vocabulary_sha256": load_tokenizer(tmp_path).sha256}))
    assert load_tokenizer(tmp_path).lower_case
    vocabulary.write_text("\n".join([*SPECIAL_TOKENS, "a", "the"]))
    with user_error("vocabulary.mismatch", vocabulary):
        load_tokenizer(tmp_path)


def test_files_that_are_left_out_are_counted(tmp_path: Path) -> None:
    for name in ("a.txt", "part-1", "b.log", "c.log", "d", "e.md", ".hidden", "eval.md5"):
        (tmp_path / name).write_text("text")
    left_out = (
        "6 of 7 files are left out because of their names: 2 .log, 2 without suffix, 1 .md, 1 .md5"
    )
    assert text_folder.name_note(tmp_path) == left_out
    for name in ("part-1", "b.log", "c.log", "d", "e.md", "eval.md5"):
        (tmp_path / name).unlink()
    assert text_folder.name_note(tmp_path) == ""


@pytest.mark.parametrize(("text", "threads"), [("1", 1), ("none", None), ("", None)])
def test_pretrain_reads_cpu_threads(
    text: str, threads: int | None, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("CPU_THREADS", text)
    plan = make_plan(10_000, 3.0, "tiny", None)
    resolved = resolve_settings(OwnFolder(tmp_path), plan.settings, 3.0, 100, False)
    assert resolved.config[ComputeConfig].cpu_threads == threads
    for wrong in ("x", "\u0663"):
        monkeypatch.setenv("CPU_THREADS", wrong)
        with user_error("config.value", "CPU_THREADS"):
            resolve_settings(OwnFolder(tmp_path), plan.settings, 3.0, 100, False)


@pytest.mark.parametrize(
    ("words", "name"),
    [("prepare eval-set --num 1 --out out --input a.txt", "a.txt")]
    + [
        (words, "result_1.txt")
        for words in ("report logs", "submission diff logs logs", "submission repeat {log}")
    ],
)
def test_links_in_a_loop_are_one_line(
    words: str, name: str, tmp_path: Path, monkeypatch, run_mlbert
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DEMO, "logs")
    for path in (Path("a.txt"), Path("logs/result_1.txt")):
        path.unlink(missing_ok=True)
        path.symlink_to(path.name)
    status, _, error = run_mlbert(*words.format(log="logs/result_0.txt").split())
    assert (status, error.count("\n"), name in error) == (2, 1, True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["loop", "pipe", "folder"])
def test_run_files_that_cannot_be_read_are_named(kind: str, name: str, tmp_path: Path) -> None:
    """A repetition says so, a report and a seal never take them for missing."""
    log = tmp_path / "result_0.txt"
    path = tmp_path / "run_0" / name
    shutil.copyfile(DEMO / log.name, log)
    path.parent.mkdir()
    {"loop": lambda: path.symlink_to(name), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[
        kind
    ]()
    assert run_file(log, name) == path
    old = read_log(log)
    first, *_, losses, _ = remarks(old, old, True)
    assert first.startswith(f"run_0/{name} cannot be read (")
    assert losses == "The log has no readable metrics.jsonl: losses are not compared."
    if name != "config.json":  # a report does not read it
        assert f"run_0/{name} cannot be read and is ignored" in read_systems([log])[0].notes
