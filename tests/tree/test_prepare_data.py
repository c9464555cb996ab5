"""launch/prepare_data.sh, from each kind of input to the sets that training reads."""

import functools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mlbert.data.formats.open import open_store
from programs import (
    RunMlbert,
    assert_refused,
    run_quietly,
    user_environ,
    write_mlbert,
    write_program,
)
from user_errors import assert_error_line

HOME = Path("benchmarks/bert/implementations/pytorch")
EVAL_SAMPLES = 20
FEW = ("--eval-samples", EVAL_SAMPLES, "--workers", "1")
Prepare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def prepare(tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepare:
    """Return prepare(*words), which runs prepare_data.sh with an `mlbert`
    that runs this tree with this Python.
    """
    programs = write_mlbert(tmp_path_factory.mktemp("bin")).parent
    environ = user_environ(PATH=f"{programs}:{os.environ['PATH']}", PYTHONPATH=tree_root / HOME)
    return functools.partial(run_quietly, tree_root / HOME / "launch/prepare_data.sh", env=environ)


@pytest.fixture(scope="module")
def vocab(tree_root: Path) -> Path:
    return tree_root / "tests" / "assets" / "instances" / "vocab.txt"


@pytest.fixture(scope="module")
def text(tree_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    documents = (tree_root / "tests/assets/instances/text.txt").read_text().strip().split("\n\n")
    for index, name in enumerate(("part-00000-of-00002", "part-00001-of-00002", "eval.txt")):
        (folder / name).write_text("\n\n".join(documents[index:] + documents[:index]) + "\n")
    return folder


def check(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r'^export (\w+)="(.*)"$', done.stdout, re.MULTILINE))
    assert set(found) == {"DATADIR_PHASE2", "EVALDIR"}
    assert len(open_store(found["EVALDIR"], verify=True)) == EVAL_SAMPLES
    assert len(open_store(found["DATADIR_PHASE2"], verify=True)) > 100
    return Path(found["DATADIR_PHASE2"])


@pytest.mark.slow
def test_text_parts(prepare: Prepare, text: Path, vocab: Path, tmp_path: Path) -> None:
    words = [
        "--outputdir",
        tmp_path,
        "--input",
        text,
        "--vocab",
        vocab,
        "--packed",
        "--shards",
        "2",
        *FEW,
    ]
    assert check(prepare(*words)).name == "packed"
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    check(prepare(*words))
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.slow
def test_tfrecords(
    prepare: Prepare, text: Path, vocab: Path, tmp_path: Path, run_mlbert: RunMlbert
) -> None:
    for given, name in ((text, "train"), (text / "eval.txt", "eval")):
        command = ["prepare", "instances", "--format", "tfrecord", "--workers", "1"]
        command += ["--input", given, "--vocab", vocab, "--out", tmp_path / name]
        status = run_mlbert(*command)[0]
        assert status == 0
    options = ["--outputdir", tmp_path / "out", "--input", tmp_path / "train"]
    options += ["--eval", tmp_path / "eval", "--bins", "--vocab", vocab, *FEW]
    assert check(prepare(*options)).name == "bins"


def test_wikiextractor(prepare: Prepare, text: Path, vocab: Path, tmp_path: Path) -> None:
    pytest.importorskip("sentencex", reason="the sentence splitter is in the extra `wiki`")
    (folder := tmp_path / "wiki/AA").mkdir(parents=True)
    documents = (text / "part-00000-of-00002").read_text().strip().split("\n\n")
    for number in range(3):
        articles = (
            f'<doc id="{i}" url="https://example.org/{i}" title="T{i}">\nT{i}\n\n{number} '
            f"{document}\n\n</doc>\n"
            for i, document in enumerate(documents)
        )
        (folder / f"wiki_{number:02d}").write_text("".join(articles))
    words = ["--outputdir", tmp_path / "out", "--input", folder.parent, "--vocab", vocab]
    assert check(prepare(*words, "--parts", "2", "--eval-articles", "4", *FEW)).name == "instances"
    assert len((tmp_path / "out/text/eval.md5").read_text().split()) == 4


@pytest.mark.parametrize(
    ("status", "is_repeated"), [(0, False), (2, False), (75, True), (137, True)]
)
def test_a_job_repeats_what_was_killed_or_too_early(
    prepare: Prepare, tmp_path: Path, status: int, is_repeated: bool
) -> None:
    run_wrapped = 'SLURM_JOB_ID=7 bash -c "${@: -1}"'
    submit = f"#!/bin/bash\n{run_wrapped}\necho $? >>{tmp_path}/ended\necho 7\n"
    write_program(tmp_path / "bin" / "sbatch", submit)
    control = f'#!/bin/bash\n[[ "$1" == show ]] || echo "$@" >>{tmp_path}/asked\nexit 1\n'
    write_program(tmp_path / "bin" / "scontrol", control)
    environ = user_environ(PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    done = prepare("--slurm", "1", "--", "bash", "-c", f"exit {status}", "--", env=environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ended").read_text().split() == [str(status)]
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if is_repeated else "")


def test_a_refused_job_cancels_those_submitted_before_it(prepare: Prepare, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    submit = f"#!/bin/bash\n[[ ! -e {jobs} ]] || {{ echo refused >&2; exit 1; }}\n"
    write_program(tmp_path / "bin/sbatch", f"{submit}echo 7 | tee {jobs}\n")
    write_program(tmp_path / "bin/scancel", f'#!/bin/bash\necho "$@" >{tmp_path}/canceled\n')
    write_program(tmp_path / "bin/scontrol", "#!/bin/bash\necho 'MaxArraySize            = 3'\n")
    environ = user_environ(PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    command = ["--", "mlbert", "prepare", "pack", "--input", tmp_path, "--out", tmp_path / "out"]
    done = prepare("--slurm", "4", *command, env=environ)
    assert_refused(done, "--slurm 4: this Slurm allows arrays of at most 3 jobs (MaxArraySize).")
    assert not jobs.exists()
    done = prepare("--slurm", "3", *command, env=environ)
    assert done.returncode == 2
    error = "error: sbatch refused a job; see its message above. "
    assert done.stderr == f"refused\n{error}The jobs submitted before it are canceled: 7.\n"
    assert (tmp_path / "canceled").read_text() == "7\n"


def test_wrong_arguments_are_one_line_errors(prepare: Prepare) -> None:
    for words, reason in {
        "": "--outputdir is missing",
        "--outputdir /tmp": "--input is missing",
        "--outputdir /tmp --input /tmp --download": "exclude each other",
        "--outputdir /tmp --packed-data --skip-download": "contains neither text nor results4",
        "--packed --bins": "exclude each other",
        "--what 1": "unknown argument --what",
        "--input": "--input needs a value",
        "--outputdir /proc/nowhere --input /tmp": "cannot be created",
    }.items():
        assert_refused(prepare(*words.split()), reason)


def test_missing_vocabulary_and_unknown_format(
    prepare: Prepare, text: Path, vocab: Path, tmp_path: Path
) -> None:
    done = prepare("--outputdir", tmp_path, "--input", text)
    assert_refused(
        done, f"error: {text}/vocab.txt does not exist. Name the vocabulary with --vocab.\n"
    )
    done = prepare("--outputdir", tmp_path, "--input", tmp_path, "--vocab", vocab)
    assert done.returncode == 2
    assert_error_line(done.stderr, "data.format", tmp_path)


def test_incomplete_mirror_names_the_missing_file(prepare: Prepare, tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    done = prepare("--outputdir", tmp_path / "out", "--download", "--mirror", tmp_path / "mirror")
    assert done.returncode == 2
    assert_error_line(done.stderr, "network.unreachable", tmp_path / "out/download/vocab.txt")
    assert (tmp_path / "out/download/bert_config.json").stat().st_size == 314
