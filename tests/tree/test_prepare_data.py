"""launch/prepare_data.sh, from each kind of input to the sets that training reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlbert.data.formats.open import open_store
from programs import assert_refused, write_program
from user_errors import assert_error_line

HOME = Path("benchmarks/bert/implementations/pytorch")
EVAL_SAMPLES = 20


@pytest.fixture(scope="module")
def environ(tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which `mlbert` runs this tree with this interpreter."""
    programs = tmp_path_factory.mktemp("bin")
    write_program(programs / "mlbert", f'#!/bin/sh\nexec {sys.executable} -m mlbert "$@"\n')
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "XDG_CACHE_HOME")}
    return kept | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(tree_root / HOME)}


@pytest.fixture(scope="module")
def vocab(tree_root: Path) -> Path:
    return tree_root / "tests" / "assets" / "instances" / "vocab.txt"


@pytest.fixture(scope="module")
def text(tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two training parts and an evaluation text."""
    folder = tmp_path_factory.mktemp("text")
    documents = (tree_root / "tests/assets/instances/text.txt").read_text().strip().split("\n\n")
    for index, name in enumerate(("part-00000-of-00002", "part-00001-of-00002", "eval.txt")):
        (folder / name).write_text("\n\n".join(documents[index:] + documents[:index]) + "\n")
    return folder


@pytest.fixture(scope="module")
def wiki(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same documents in WikiExtractor's output format."""
    folder = tmp_path_factory.mktemp("wiki")
    (folder / "AA").mkdir()
    documents = (text / "part-00000-of-00002").read_text().strip().split("\n\n")
    for number in range(3):
        articles = (
            f'<doc id="{i}" url="https://example.org/{i}" title="T{i}">\nT{i}\n\n{number} {document}\n\n</doc>\n'
            for i, document in enumerate(documents)
        )
        (folder / "AA" / f"wiki_{number:02d}").write_text("".join(articles))
    return folder


def run(environ: dict[str, str], tree_root: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [str(tree_root / HOME / "launch/prepare_data.sh"), *map(str, words)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def exports(output: str) -> dict[str, Path]:
    return {name: Path(value) for name, value in re.findall(r'^export (\w+)="(.*)"$', output, re.MULTILINE)}


def check(done: subprocess.CompletedProcess[str]) -> Path:
    """Check that both sets open and return the training set's path."""
    assert done.returncode == 0, done.stdout + done.stderr
    found = exports(done.stdout)
    assert set(found) == {"DATADIR_PHASE2", "EVALDIR"}
    assert len(open_store(found["EVALDIR"], verify=True)) == EVAL_SAMPLES
    assert len(open_store(found["DATADIR_PHASE2"], verify=True)) > 100
    return found["DATADIR_PHASE2"]


@pytest.mark.slow
def test_text_parts(environ: dict[str, str], tree_root: Path, text: Path, vocab: Path, tmp_path: Path) -> None:
    words = ["--outputdir", tmp_path, "--input", text, "--vocab", vocab, "--packed", "--shards", "2"]
    words += ["--eval-samples", EVAL_SAMPLES, "--workers", "1"]
    train = check(run(environ, tree_root, *words))
    assert train.name == "packed"
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    check(run(environ, tree_root, *words))
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.slow
def test_tfrecords(environ: dict[str, str], tree_root: Path, text: Path, vocab: Path, tmp_path: Path) -> None:
    mlbert = [sys.executable, "-m", "mlbert", "prepare", "instances", "--format", "tfrecord", "--workers", "1"]
    for given, name in ((text, "train"), (text / "eval.txt", "eval")):
        command = [*mlbert, "--input", given, "--vocab", vocab, "--out", tmp_path / name]
        subprocess.run(list(map(str, command)), env=environ, check=True, capture_output=True)
    words = ["--outputdir", tmp_path / "out", "--input", tmp_path / "train", "--eval", tmp_path / "eval", "--bins"]
    done = run(environ, tree_root, *words, "--vocab", vocab, "--eval-samples", EVAL_SAMPLES, "--workers", "1")
    assert check(done).name == "bins"


def test_wikiextractor(environ: dict[str, str], tree_root: Path, wiki: Path, vocab: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentencex", reason="the sentence splitter is in the extra `wiki`")
    words = ["--outputdir", tmp_path, "--input", wiki, "--vocab", vocab, "--parts", "2", "--eval-articles", "4"]
    done = run(environ, tree_root, *words, "--eval-samples", EVAL_SAMPLES, "--workers", "1")
    assert check(done).name == "instances"
    assert len((tmp_path / "text" / "eval.md5").read_text().split()) == 4


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "--outputdir is missing"),
        (["--outputdir", "/tmp"], "--input is missing"),
        (["--outputdir", "/tmp", "--input", "/tmp", "--download"], "exclude each other"),
        (["--packed", "--bins"], "exclude each other"),
        (["--what", "1"], "unknown argument --what"),
        (["--input"], "--input needs a value"),
        (["--outputdir", "/proc/nowhere", "--input", "/tmp"], "cannot be created"),
    ],
)
def test_wrong_arguments_are_one_line_errors(
    words: list[str], reason: str, environ: dict[str, str], tree_root: Path
) -> None:
    assert_refused(run(environ, tree_root, *words), reason)


def test_missing_vocabulary_and_unknown_input_format_are_named(
    environ: dict[str, str], tree_root: Path, text: Path, vocab: Path, tmp_path: Path
) -> None:
    done = run(environ, tree_root, "--outputdir", tmp_path, "--input", text)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {text}/vocab.txt does not exist. Name the vocabulary with --vocab.\n",
    )
    done = run(environ, tree_root, "--outputdir", tmp_path, "--input", tmp_path, "--vocab", vocab)
    assert done.returncode == 2
    assert_error_line(done.stderr, "data.format", tmp_path)


def test_incomplete_mirror_names_the_missing_file(environ: dict[str, str], tree_root: Path, tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    done = run(environ, tree_root, "--outputdir", tmp_path / "out", "--download", "--mirror", tmp_path / "mirror")
    assert done.returncode == 2
    assert_error_line(done.stderr, "network.unreachable", tmp_path / "out/download/vocab.txt")
    assert (tmp_path / "out/download/bert_config.json").stat().st_size == 314
