"""Steps that are shared, killed and started again make the same bytes."""

import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlbert.data.formats.checksums import CHECKSUMS
from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.prepare import clean as clean_module
from mlbert.data.prepare import import_store as import_store_module
from mlbert.data.prepare.clean import CleanOptions, clean
from mlbert.data.prepare.corpus_files import find_sources
from mlbert.data.prepare.custom_corpus import Request, prepare
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.export_nvidia import export_nvidia
from mlbert.data.prepare.finished_output import WORK_FOLDER
from mlbert.data.prepare.import_store import import_store
from mlbert.data.prepare.instance_set import InstanceJob, prepare_instances
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.shares import Share, parse_share
from mlbert.data.prepare.shuffle import Packing, shuffle_set
from mlbert.data.prepare.split_bins import make_bins, make_hdf5_bins
from mlbert.data.prepare.streaming import Concatenation, convert_files
from mlbert.data.prepare.tfrecords import hdf5_to_tfrecords, tfrecords_to_hdf5
from mlbert.data.prepare.verify import verify
from mlbert.host.files import is_leftover
from nvidia_shards import bert_rows, write_vocabulary
from programs import wait_for, write_files
from step_shares import run_share
from stored_sets import flip, tree, write_set
from user_errors import user_error

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


@pytest.mark.parametrize("name", [*STEPS, "instances"])
def test_any_shares_in_any_order_and_at_once_make_the_same_bytes(tmp_path, name):
    step = STEPS.get(name, instances)
    draw = random.Random(name)
    source = write_source(tmp_path, 120, 0)
    count = draw.randint(2, 7)
    step(source, tmp_path / "one", Executor(share=Share()))
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
    step(source, tmp_path / "many", Executor(share=Share.only_merge()))
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
    convert_files(text, ["train", "val"], out, tokenizer=tokenizer, form=how, executor=run)


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


def export_two_files(source: Path, out: Path, run: Executor) -> None:
    export_nvidia(source, out, "fixed", num_files=2, executor=run)


def make_two_bins(source: Path, out: Path, run: Executor) -> None:
    make_hdf5_bins(source, out, edges=(8, 32), executor=run)


def verify_source(source: Path, out: Path, run: Executor) -> None:
    verify([source], executor=run)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *STEPS.items(),
        ("instances", instances),
        ("convert_dataset.py", convert_text),
        ("pretrain", prepare_corpus),
        ("clean", clean_wiki),
        ("export-nvidia", export_two_files),
        ("bins-hdf5", make_two_bins),
        ("verify", verify_source),
    ],
)
def test_what_this_process_has_used_can_be_sent_to_spawned_workers(
    tmp_path, monkeypatch, name, step
):
    monkeypatch.setattr(clean_module, "UNIT_BYTES", 1)
    monkeypatch.setattr(import_store_module, "PIECE", 60)
    source = write_source(tmp_path, 120, 0)
    step(source, tmp_path / "sent", WarmExecutor(workers=2))
    step(source, tmp_path / "kept", Executor())
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
    STEPS["pack"](source, tmp_path / "out", Executor(share=Share.only_merge()))


def test_missing_tasks_another_plan_and_changed_input_are_named(source, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):  # passes
        for index in (0, 1, 3):
            run_share(STEPS["pack"], source, out, index, 4)
    with user_error("data.incomplete", out) as caught:
        STEPS["pack"](source, out, Executor(share=Share.only_merge()))
    assert "of the pass spreading are missing: 2/3" in str(caught.value)
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
    STEPS["pack"](source, out, Executor(share=Share.only_merge()))
    assert not (out / WORK_FOLDER).exists()
    run_share(instances, source, tmp_path / "set", 0, 2)
    with (tmp_path / "part-4").open("a") as part:
        part.write("More.\n")
    with user_error("data.changed", tmp_path / "part-4", wording=False):
        instances(source, tmp_path / "set", Executor(share=Share(0, 2, merges=False)))


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
