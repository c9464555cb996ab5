"""Work over processes: results in order, a quick end by a signal,
shares of a step in any order and after kills.
"""

import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import mlbert
from mlbert.data.formats.checksums import CHECKSUMS
from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare import clean as clean_module
from mlbert.data.prepare import import_store as import_store_module
from mlbert.data.prepare.clean import CleanOptions, clean
from mlbert.data.prepare.corpus_files import find_sources
from mlbert.data.prepare.custom_corpus import Request, prepare
from mlbert.data.prepare.export_nvidia import export_nvidia
from mlbert.data.prepare.import_store import import_store
from mlbert.data.prepare.instance_set import InstanceJob, prepare_instances
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.jobs import (
    ALL,
    C_SOURCES,
    MERGE,
    WORK_FOLDER,
    Executor,
    Share,
    code_identity,
    expand_inputs,
    inspect_parts,
    parse_share,
)
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.split_bins import make_bins, make_hdf5_bins
from mlbert.data.prepare.step_tasks import PLAN, SHARED, ShareDone
from mlbert.data.prepare.streaming import Concatenation, convert_files
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords, tfrecords_to_hdf5
from mlbert.data.prepare.verify import verify
from mlbert.host import native
from mlbert.host.errors import UserError
from mlbert.host.files import is_leftover
from mlbert.host.json_files import add_checksum, parse_checksummed
from nvidia_shards import bert_rows, write_vocabulary
from programs import run_quietly, wait_for, write_files
from stored_sets import flip, tree, write_set
from user_errors import assert_error_line, user_error

SLEEPER = (
    "import os, sys, time; from pathlib import Path; from mlbert.data.prepare import jobs\n"
    "def sleep_long(begun):\n"
    "    begun.touch()\n"
    "    time.sleep(300)\n"
    "if __name__ == '__main__':\n"
    "    paths = [Path(p) for p in sys.argv[1:]]\n"
    "    if {stream}:\n"
    "        with jobs.Executor(2).stream(sleep_long, paths, Path()) as results:\n"
    "            list(results)\n"
    "    jobs.Executor(2).run(sleep_long, paths, name='n', where=Path(), sizes=[1, 1, 1])\n"
    "elif {slow_import}:\n"
    "    os.write(1, b'%d\\n' % os.getpid())\n"  # one write: two processes do it at once
    "    time.sleep(600)\n"
)


def double(number: int) -> int:
    return 2 * number


def refuse_two(number: int) -> int:
    if number == 2:
        raise UserError("data.damaged", "two", "is refused")
    return number


def be_killed(number: int) -> None:
    if number:
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGKILL)


def run(function, items, workers):
    return Executor(workers).run(
        function, items, name="work", where=Path("out"), sizes=[1] * len(items)
    )


def stream(function, items, workers):
    with Executor(workers).stream(function, iter(items), Path("out")) as results:
        return [result for _, result in results]


FORMS = pytest.mark.parametrize("run", [run, stream])


@FORMS
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_in_order_and_an_error_as_it_is(run, workers):
    assert run(double, range(7), workers) == [2 * number for number in range(7)]
    assert run(double, [], workers) == []
    with user_error("data.damaged", "two", wording=False):
        run(refuse_two, range(5), workers)


def test_a_stream_takes_few_items_ahead():
    taken = []
    items = (taken.append(number) or number for number in range(100))
    with Executor(2).stream(double, items, Path("out")) as results:
        assert next(results) == (0, 0)
        assert len(taken) <= 4
        assert next(results) == (1, 2)
        assert len(taken) <= 5


@FORMS
def test_a_killed_worker_is_reported(run):
    with user_error("machine.memory", "out"):
        run(be_killed, range(3), 2)


def sleeping(
    folder: Path, begun: list[Path], stream: bool, slow_import: bool = False
) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(SLEEPER.format(stream=stream, slow_import=slow_import))
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, program, *begun], env=environ, **pipes, start_new_session=True
    )


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_that_starts_leaves_ctrl_c_to_the_main_process(tmp_path):
    process = sleeping(tmp_path, [tmp_path / name for name in "abc"], stream=True, slow_import=True)
    worker = int(process.stdout.readline())
    os.kill(worker, signal.SIGINT)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1].count("Traceback") == 1, "that of the main process"


@pytest.mark.parametrize(
    ("number", "whole_group", "stream"),
    [(signal.SIGTERM, False, True), (signal.SIGTERM, True, False), (signal.SIGINT, True, False)],
)
def test_a_signal_ends_it_at_once_and_without_a_word(tmp_path, number, whole_group, stream):
    begun = [tmp_path / name for name in "abc"]
    process = sleeping(tmp_path, begun, stream)
    wait_for(
        lambda: sum(path.exists() for path in begun) == 2 or process.poll() is not None, seconds=120
    )
    (os.killpg if whole_group else os.kill)(process.pid, number)
    error = process.communicate(timeout=60)[1]
    if number == signal.SIGTERM:
        assert (process.returncode, error) == (128 + number, "")
    else:
        assert process.returncode == -signal.SIGINT
        assert "leaked" not in error
    wait_for(lambda: not group_exists(process.pid), seconds=120)
    assert sum(path.exists() for path in begun) == 2


def make(folder: Path, *names: str) -> Path:
    return write_files(folder, {name: f"text of {name}\n" for name in names})


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_a_folder_gives_its_parts_sorted_or_has_none(tmp_path):
    folder = make(
        tmp_path / "parts",
        "part-00001-of-00002",
        "part-00000-of-00002",
        "more.txt",
        # No parts:
        "eval.txt",
        "eval_2.txt",
        "part-00000.md5",
        "notes.md",
        "part-00000-of-00002.tfrecord",
        "x.txt.tmp",
    )
    (folder / "part-00003").mkdir()
    assert names(expand_inputs([folder])) == [
        "more.txt",
        "part-00000-of-00002",
        "part-00001-of-00002",
    ]
    with user_error("data.missing", tmp_path / "text"):
        expand_inputs([make(tmp_path / "text", "eval.txt")])
    one = make(tmp_path / "one", "eval.txt", "b")
    two = make(tmp_path / "two", "a.txt")
    assert names(expand_inputs([one / "eval.txt", two, one / "b"])) == ["eval.txt", "a.txt", "b"], (
        "the order given"
    )


@pytest.mark.parametrize("name", ["part-{}-of-00004", "train-{}-of-00004.txt"])
def test_missing_parts_of_a_folder(tmp_path, name):
    folder = make(tmp_path / "text", name.format("00000"), name.format("00003"))
    with user_error("data.incomplete", folder):
        expand_inputs([folder])
    expanded = expand_inputs([folder], skip_bad=True)
    assert names(expanded) == [name.format(f"{index:05d}") for index in range(4)]
    assert [bool(part.problem) for part in inspect_parts(expanded, skip_bad=True)] == [
        False,
        True,
        True,
        False,
    ]
    assert len(expand_inputs([folder / name.format("00000")])) == 1


def test_invalid_parts_are_refused(tmp_path):
    folder = write_files(
        tmp_path / "text", {"a": "a", "copy": "a", "b": "b", "empty": "", "empty_too": ""}
    )
    paths = [folder / name for name in ("b", "a", "empty", "copy", "empty_too", "absent", "a", ".")]
    codes = [None, None, "data.empty", "data.duplicate", "data.empty"]
    codes += ["file.unreadable", "data.duplicate", "file.wrong-kind"]
    for path, code in zip(paths, codes, strict=True):
        if code:
            with user_error(code, path):
                inspect_parts([folder / "a", path])
    found = inspect_parts(paths, skip_bad=True)
    assert (found[0].num_bytes, found[0].sha256) == (1, hashlib.sha256(b"b").hexdigest())
    assert [part.problem and part.problem.code for part in found] == codes
    with user_error("data.damaged", "--input"):
        inspect_parts([folder / "empty", folder / "empty_too"], skip_bad=True)
    with user_error("data.missing", "--input"):
        inspect_parts([])


ASSETS = Path(__file__).resolve().parents[3] / "assets" / "instances"
FORK = multiprocessing.get_context("fork")  # saves the seconds of a new interpreter
STEPS: dict[str, Callable[..., object]] = {
    "pack": lambda source, out, run: shuffle_set(
        source, out, packing=Packing(), num_shards=5, executor=run
    ),
    "bins": lambda source, out, run: make_bins(
        source, out, edges=(8, 16, 32), num_shards=2, executor=run
    ),
    "import": lambda source, out, run: import_store(
        source, source.parent / "vocab.txt", out, executor=run
    ),
    "hdf5-to-tfrecord": lambda source, out, run: hdf5_to_tfrecords(source, out, executor=run),
    "tfrecord-to-hdf5": lambda source, out, run: tfrecords_to_hdf5(
        [records_of(source)], source.parent / "vocab.txt", out, executor=run
    ),
}


def records_of(source: Path) -> Path:
    """Return the source as TFRecords, written once."""
    records = source.parent / "records"
    if not records.exists():
        hdf5_to_tfrecords(source, records)
    return records


def instances(source: Path, out: Path, run: Executor) -> None:
    """Make instances of five texts next to the source, which are written once."""
    documents = (ASSETS / "text.txt").read_text().strip().split("\n\n")
    parts = [source.parent / f"part-{number}" for number in range(5)]
    for number, part in enumerate(parts):
        if not part.exists():
            part.write_text("\n\n".join(documents[number:] + documents[:number]) + "\n")
    prepare_instances(InstanceJob(tuple(parts), ASSETS / "vocab.txt", out, InstanceOptions()), run)


def write_source(folder: Path, count: int, seed: int) -> Path:
    """Write a set whose sequences have the special tokens of the vocabulary next to it."""
    vocabulary = write_vocabulary(folder / "vocab.txt")
    rows = bert_rows(count, seed, max_length=29)
    return write_set(folder / "source", rows, shards=5, vocabulary=file_sha256(vocabulary))


def run_share(step: Callable[..., object], source: Path, out: Path, index: int, count: int) -> int:
    """Run a share and return its exit status."""
    with pytest.raises(ShareDone) as done:
        step(source, out, Executor(share=Share(index, count, merges=False)))
    return int(done.value.code)


@pytest.mark.parametrize("name", [*STEPS, "instances"])
def test_any_shares_in_any_order_and_at_once_make_the_same_bytes(tmp_path, name):
    step = STEPS.get(name, instances)
    draw = random.Random(name)
    source = write_source(tmp_path, 120, 0)
    count = draw.randint(2, 7)
    step(source, tmp_path / "one", Executor(share=ALL))
    for _ in range(3):  # passes
        twins = [
            FORK.Process(target=run_share, args=(step, source, tmp_path / "many", 0, count))
            for _ in range(2)
        ]
        for twin in twins:
            twin.start()
        for twin in twins:
            twin.join()
            assert twin.exitcode == 0
        shares = [*range(count), draw.randrange(count)]
        draw.shuffle(shares)
        for index in shares:
            run_share(step, source, tmp_path / "many", index, count)
    step(source, tmp_path / "many", Executor(share=MERGE))
    assert tree(tmp_path / "many") == tree(tmp_path / "one")


@pytest.mark.parametrize("name", STEPS)
def test_a_finished_output_is_kept_and_a_damaged_one_made_again(tmp_path, monkeypatch, name, said):
    monkeypatch.setattr(import_store_module, "PIECE", 200)
    source = write_source(tmp_path, 1000, 0)
    out = tmp_path / "out"

    def run() -> None:
        STEPS[name](source, out, Executor(workers=1, progress=said))

    run()
    whole = tree(out)
    *_, first, second = sorted(path for path in out.rglob("*-of-*") if path.is_file())
    kept = first.stat().st_mtime_ns
    run()
    assert "nothing to do" in said.lines[-1]
    for damage, is_listed in ((Path.unlink, False), (flip, True), (flip, False)):
        damage(second)
        if not is_listed and name != "hdf5-to-tfrecord":  # whose checksums are in the list only
            (second.parent / CHECKSUMS).unlink()
        run()
        assert re.search(
            r"(missing|manifest's|No such file.*|checksums.xxh3): rebuilding it", said.lines[-1]
        )
        assert tree(out) == whole
    for summary in out.glob("*.json"):  # as an interrupted run leaves it
        summary.unlink()
    second.write_bytes(b"half")
    second.with_name(f"{second.name}.tmp").write_bytes(b"half")
    run()
    assert tree(out) == whole
    assert first.stat().st_mtime_ns == kept or name == "hdf5-to-tfrecord"


@dataclass(frozen=True)
class WarmExecutor(Executor):
    """Calls each function in this process first: what it caches must not keep it from being sent to
    another one.
    """

    def stream(self, function, items, where, ahead=0):
        items = list(items)
        function(items[0])
        return super().stream(function, items, where, ahead)


def convert_text(source: Path, out: Path, run: Executor) -> None:
    """Convert one file to two splits of tokens. The file's task is the only one of its pass."""
    text = source.parent / "texts.txt"
    text.write_text("\n\n".join(f"Text {number} of the river." for number in range(200)))
    how = Concatenation(16, "", "", wrap=True)
    tokenizer = load_tokenizer("bert-base-uncased")
    convert_files(text, ["train", "val"], out, tokenizer=tokenizer, concatenation=how, executor=run)


def prepare_corpus(source: Path, out: Path, run: Executor) -> None:
    """Prepare a text of many documents for `mlbert pretrain`."""
    text = source.parent / "corpus.txt"
    if not text.exists():  # its time of change is in the output
        draw = random.Random(0)
        documents = [" ".join(draw.choices("abcdefgh", k=40)) for _ in range(600)]
        text.write_text("\n\n".join(documents))
    out.mkdir()
    prepare(Request(find_sources([text], out), None, 400, None, 32, 0.15), out, run)


def clean_wiki(source: Path, out: Path, run: Executor) -> None:
    """Clean two files of WikiExtractor, each a task."""
    pytest.importorskip("sentencex", reason="the splitter is in the extra `wiki`")
    wiki = source.parent / "wiki"
    if not wiki.exists():  # as above
        article = '<doc id="{0}" title="T">\nT\n\nArticle {0}. It is short.\n</doc>\n'
        articles = [article.format(number) for number in range(10)]
        files = {"wiki_00": "".join(articles[:5]), "wiki_01": "".join(articles[5:])}
        write_files(wiki / "AA", files)
    clean(wiki, out, CleanOptions(2, 2), run)


SENT: dict[str, Callable[..., object]] = STEPS | {
    "instances": instances,
    "convert_dataset.py": convert_text,
    "pretrain": prepare_corpus,
    "clean": clean_wiki,
    "export-nvidia": lambda source, out, run: export_nvidia(
        source, out, "fixed", num_files=2, executor=run
    ),
    "bins-hdf5": lambda source, out, run: make_hdf5_bins(source, out, edges=(8, 32), executor=run),
    "verify": lambda source, out, run: verify([source], executor=run),
}


@pytest.mark.parametrize("name", SENT)
def test_what_this_process_has_used_can_be_sent_to_spawned_workers(tmp_path, monkeypatch, name):
    monkeypatch.setattr(clean_module, "UNIT_BYTES", 1)
    monkeypatch.setattr(import_store_module, "PIECE", 60)
    source = write_source(tmp_path, 120, 0)
    SENT[name](source, tmp_path / "sent", WarmExecutor(workers=2))
    SENT[name](source, tmp_path / "kept", Executor())
    if name != "verify":
        assert tree(tmp_path / "sent") == tree(tmp_path / "kept") != {}


def count_shards(folder: Path) -> int:
    """Count files by name, also while folders vanish."""
    return sum("-of-" in name for _, _, names in os.walk(folder) for name in names)


@pytest.mark.parametrize("name", STEPS)
def test_killed_at_any_moment_and_started_again_makes_the_same_bytes(tmp_path, name):
    source = write_source(tmp_path, 6000, 0)
    out = tmp_path / "out"
    killed = 0
    STEPS[name](source, tmp_path / "one", Executor(workers=1))
    for _ in range(50):  # a run may end before it is killed
        process = FORK.Process(target=STEPS[name], args=(source, out, Executor(workers=1)))
        process.start()
        files = count_shards(out)
        wait_for(
            lambda files=files, run=process: count_shards(out) > files or not run.is_alive(),
            seconds=60,
        )
        time.sleep(random.random() * 0.02)
        process.kill()
        process.join()
        if process.exitcode == 0:
            shutil.rmtree(out)
            continue
        assert process.exitcode == -signal.SIGKILL
        killed += 1
        if killed == 2:
            break
    assert killed == 2
    STEPS[name](source, out, Executor(workers=1))
    assert tree(out) == tree(tmp_path / "one")


def test_a_share_that_is_started_before_the_earlier_pass_is_complete_ends_with_75(source, tmp_path):
    def run(index: int) -> int:
        return run_share(STEPS["pack"], source, tmp_path / "out", index, 6)

    shares = [0, 1, 3, 4, 5]  # three of them have no task in the first pass
    assert [run(index) for index in shares] == [0] * 5
    assert [run(index) for index in shares] == [75] * 5
    assert run(2) == 0
    assert [run(index) for index in shares] == [0] * 5
    STEPS["pack"](source, tmp_path / "out", Executor(share=MERGE))


def test_missing_tasks_another_plan_and_changed_input_are_named(source, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):  # passes
        for index in (0, 1, 3):
            run_share(STEPS["pack"], source, out, index, 4)
    with user_error("data.incomplete", out) as caught:
        STEPS["pack"](source, out, Executor(share=MERGE))
    assert "of spreading are missing: 2/3" in str(caught.value)
    run_share(STEPS["pack"], source, out, 0, 1)
    with user_error("prepare.other-options", out) as caught:
        shuffle_set(
            source,
            out,
            packing=Packing(),
            num_shards=4,
            executor=Executor(share=Share(0, 2, merges=False)),
        )
    assert "shards 5, not 4" in str(caught.value)
    with user_error(
        "prepare.other-options", out
    ):  # also from a local run, which would replace another local run's
        shuffle_set(source, out, packing=Packing(), num_shards=4)
    STEPS["pack"](source, out, Executor(share=MERGE))
    assert not (out / WORK_FOLDER).exists()
    run_share(instances, source, tmp_path / "set", 0, 2)
    with (tmp_path / "part-4").open("a") as part:
        part.write("More.\n")
    with user_error("data.changed", tmp_path / "part-4", wording=False):
        instances(source, tmp_path / "set", Executor(share=Share(0, 2, merges=False)))


PACKAGE = Path(mlbert.__file__).parent


def copy_package(folder: Path, changed: str) -> Path:
    """Copy the package with its C sources, append a comment to a file,
    and return the folder for PYTHONPATH.
    """
    shutil.copytree(PACKAGE, folder / "mlbert", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(native.SOURCE_FOLDER, folder / "csrc" / "cpu")
    with (folder / changed).open("a") as file:
        file.write("// changed\n" if changed.endswith(".c") else "# changed\n")
    return folder


def run_pack(package: Path, source: Path, out: Path, *words: str) -> tuple[int, str]:
    """Run ``mlbert prepare pack`` with a copy of the package;
    return its status and the lines of its errors.
    """
    command = ("-m", "mlbert", "prepare", "pack", "--input", source, "--out", out, "--workers", "1")
    done = run_quietly(
        sys.executable, *command, *words, env=os.environ | {"PYTHONPATH": str(package)}
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        ("mlbert/data/formats/packing.py", True),
        ("csrc/cpu/instances.c", True),
        ("mlbert/training/loop.py", False),
    ],
)
def test_code_that_decides_bytes_must_be_that_of_the_first_share(
    source, tmp_path, changed, is_refused
):
    other = copy_package(tmp_path / "other", changed)
    out = tmp_path / "out"
    run_share(STEPS["pack"], source, out, 0, 2)
    before = tree(out)
    status, errors = run_pack(other, source, out, "--task", "1/2", "--shards", "5")
    assert status == (2 if is_refused else 0), errors
    if is_refused:
        assert_error_line(errors, "prepare.other-version", out, wording=False)
        assert tree(out) == before


def rewrite_plan(out: Path, **changes: object) -> None:
    """Change entries of a plan, or remove those that are None, with a new checksum."""
    path = out / WORK_FOLDER / PLAN
    plan = {**parse_checksummed(path.read_text()), **changes}
    kept = {name: value for name, value in plan.items() if value is not None}
    path.write_text(json.dumps(add_checksum(kept)))


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_step_that_other_code_began_is_refused(source, tmp_path, is_shared):
    out = tmp_path / "out"
    step = STEPS["pack"]
    run_share(step, source, out, 0, 2)
    if not is_shared:
        (out / WORK_FOLDER / SHARED).unlink()
    shares = [ALL, MERGE, Share(1, 2, merges=False)] if is_shared else [ALL]
    identity = {**code_identity(), "code": "0" * 64, "unicode": "1.0"}
    for made_by in (None, identity, {**identity, "tool": "mlbert 0.0.1"}):
        rewrite_plan(out, made_by=made_by)
        before = tree(out)
        for share in shares:
            with user_error("prepare.other-version", out, wording=False) as caught:
                step(source, out, Executor(share=share))
            begun_by = "an earlier version" if made_by is None else made_by["tool"]
            assert f"was begun by {begun_by}" in str(caught.value)
        assert tree(out) == before
    (out / WORK_FOLDER / PLAN).write_text("{}")
    with user_error("data.damaged", PLAN):
        step(source, out, Executor(share=Share(1, 2, merges=False)))


def test_the_identity_of_code_covers_every_c_source():
    found = set()
    for folder in ("formats", "prepare"):
        for module in (PACKAGE / "data" / folder).rglob("*.py"):
            found |= {*re.findall(r'"(\w+\.c)"', module.read_text())}
    for name in [*found]:
        found |= {*re.findall(r'#include "(.*)"', (native.SOURCE_FOLDER / name).read_text())}
    assert found == {*C_SOURCES}


def test_wrong_shares():
    for task in ("1", "1/0", "-1/2", "2/2"):
        code = "config.range" if task == "2/2" else "config.value"
        with user_error(code, "--task"):
            parse_share(task, merge=False)
    with user_error("config.conflict", "--task and --merge"):
        parse_share("0/2", merge=True)


def test_a_temporary_file_of_a_living_process_is_left_alone(tmp_path):
    host = os.uname().nodename
    names = {f"a.{os.getpid()}@{host}.tmp": False, f"a.4194304@{host}.tmp": True}
    names |= {"a.1@elsewhere.tmp": False, "a": False}
    for name, gone in names.items():
        (tmp_path / name).touch()
        assert is_leftover(tmp_path / name) == gone
    os.utime(tmp_path / "a.1@elsewhere.tmp", (0, 0))
    assert is_leftover(tmp_path / "a.1@elsewhere.tmp")
