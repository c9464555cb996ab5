"""``mlbert prepare tokens``: text of any size to sets of token ids."""

import csv
import json
import os
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

from mlbert.data.formats.mds import MdsReader
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.data.prepare import (
    executor,
    kept_documents,
    python_text,
    token_chunks,
    token_plan,
    token_set,
)
from mlbert.data.prepare.corpus_files import find_sources
from mlbert.data.prepare.custom_corpus import read_facts
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.kept_documents import first_of_each
from mlbert.data.prepare.shares import Share
from mlbert.data.prepare.step_tasks import ShareDone
from mlbert.data.prepare.token_set import TokenRequest, prepare_tokens
from mlbert.host.process_memory import descendants_of, memory_of
from programs import RunMlbert
from user_errors import user_error

NOUNS = ("river", "teacher", "engine", "window", "garden", "letter")
LENGTH = 24
DOCUMENTS = 900
LONG = 40  # sentences
GERMAN = (
    "der Garten die Lehrerin und nach Hause zwischen Kindern abends gehen zurück durch Straßen "
    "nicht weiter über Brücken mit vielen schönen Geschichten von früher wurde erzählt während"
)
FRENCH = (
    "le jardin la maîtresse et vers maison entre enfants soir rentrent encore par rues jamais "
    "plus sur ponts avec beaucoup de belles histoires du passé était racontée pendant qu'ils"
)
MOST_OF_A_PROCESS = 30e6  # bytes; 60e6 to 90e6 if each loads everything itself
# In a small process: a program inherits the peak of the one that started it.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print("", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def sentence(draw: random.Random) -> str:
    names = ["".join(draw.choices("aeilnorst", k=6)) for _ in range(3)]  # repeats compare letters
    return f"The {names[0]} {draw.choice(NOUNS)} sees {names[1]} and {names[2]}."


def made_documents(seed: int, count: int = DOCUMENTS) -> list[str]:
    """Return documents of a few sentences; one is long, and one is there twice."""
    draw = random.Random(seed)
    found = [
        " ".join(sentence(draw) for _ in range(draw.randrange(1, 5))) for _ in range(count - 2)
    ]
    long = " ".join(sentence(draw) for _ in range(LONG))
    return [*found, long, found[3]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("bert-base-uncased")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and groups from little text."""
    monkeypatch.setattr(token_chunks, "TOGETHER", 4000)
    monkeypatch.setattr(token_chunks, "CHUNK_CHARACTERS", 15_000)
    monkeypatch.setattr(token_set, "GROUP_BYTES", 50_000)


def write_rows(path: Path, documents: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def request_of(folder: Path, tokenizer: Tokenizer, **options) -> TokenRequest:
    sources = {"text": find_sources([folder], folder / "none")}
    return TokenRequest(sources, tokenizer, LENGTH, 0.15, **options)


def samples_of(folder: Path) -> list[np.ndarray]:
    reader = MdsReader(folder)
    return [reader[number]["input_ids"] for number in range(len(reader))]


def ids_of(value: object) -> list[int]:
    """Return the ids of a stored array of 16 bits: a byte, its length, and the numbers."""
    data = bytes(value)  # type: ignore[call-overload]
    width = 1 << (data[0] % 4)
    return np.frombuffer(data[1 + width :], "<u2").tolist()


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.usefixtures("small_chunks")
def test_each_token_is_in_one_sample_without_repeats_and_held_out_text(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    documents = made_documents(1)
    write_rows(tmp_path / "text/a.jsonl", documents[:400])
    write_rows(tmp_path / "text/b.jsonl", documents[400:])
    prepared = prepare_tokens(request_of(tmp_path / "text", tokenizer), tmp_path / "out")
    assert prepared is not None
    facts = prepared.facts
    source = prepared.sources["text"]
    assert facts.documents == DOCUMENTS
    samples = [ids_of(value) for value in samples_of(tmp_path / "out/train")]
    held_out = [ids_of(value) for value in samples_of(tmp_path / "out/val")]
    assert len(samples) == facts.train_sequences == source.pieces
    for ids in (*samples, *held_out):
        assert (ids[0], ids[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
        assert 2 < len(ids) <= LENGTH

    def joined(pieces: list[list[int]]) -> str:
        return " ".join(str(number) for ids in pieces for number in ids[1:-1])

    trained = joined(samples)
    evaluated = joined(held_out)
    in_both = [
        (words in f" {trained} ", words in f" {evaluated} ")
        for text in documents
        for words in [f" {' '.join(map(str, tokenizer.encode(text)))} "]
    ]
    assert all(one != other for one, other in in_both), "in one of both, and completely"
    assert 0 < sum(other for _, other in in_both) < DOCUMENTS / 5
    assert source.cut > 0, "the long document became several samples"
    long = " ".join(map(str, tokenizer.encode(documents[-2])))
    assert trained.count(long) + evaluated.count(long) == 1
    repeat = " ".join(map(str, tokenizer.encode(documents[-1])))
    assert trained.count(repeat) + evaluated.count(repeat) == 1, "the second one is dropped"
    assert len(list((tmp_path / "out/train").glob("*.mds"))) > 5
    assert not (tmp_path / "out/.tasks").exists()


@pytest.mark.usefixtures("small_chunks")
def test_the_bytes_do_not_depend_on_processes_shares_and_interruptions(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = made_documents(2)
    for number in range(3):
        write_rows(tmp_path / f"text/{number}.jsonl", documents[number::3])
    request = request_of(tmp_path / "text", tokenizer)
    prepare_tokens(request, tmp_path / "one")
    expected = contents(tmp_path / "one")

    prepare_tokens(request, tmp_path / "two", Executor(2))
    assert contents(tmp_path / "two") == expected

    for _ in range(2):  # passes
        for index in range(2):
            executor = Executor(share=Share(index, 2, merges=False))
            with pytest.raises(ShareDone):
                prepare_tokens(request, tmp_path / "shared", executor)
    prepare_tokens(request, tmp_path / "shared", Executor(share=Share.only_merge()))
    assert contents(tmp_path / "shared") == expected

    write = token_chunks.ChunkStore.write
    left = 3

    def fails_later(*arguments: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(token_chunks.ChunkStore, "write", fails_later)
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(request, tmp_path / "again")
    stored = sorted(path.name for path in (tmp_path / "again/.tasks").glob("*.docs"))
    assert len(stored) == 2
    monkeypatch.setattr(token_chunks.ChunkStore, "write", write)
    prepare_tokens(request, tmp_path / "again")
    assert contents(tmp_path / "again") == expected
    assert prepare_tokens(request, tmp_path / "again") is None, "nothing to do"


@pytest.mark.usefixtures("small_chunks")
def test_a_sample_plans_disk_and_tokens_within_a_fifth(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = made_documents(6, 2 * DOCUMENTS)
    write_rows(tmp_path / "text/a.jsonl", documents[:600])
    (tmp_path / "text/b.txt").write_text("\n\n".join(documents[600:]))
    monkeypatch.setattr(token_plan, "TOGETHER", 4000)
    monkeypatch.setattr(token_plan, "LEAST_SLICE", 1000)
    request = request_of(tmp_path / "text", tokenizer)
    plan = token_plan.plan_tokens(request, Executor())
    assert plan.tried_bytes < request.num_bytes / 3
    prepared = prepare_tokens(request, tmp_path / "out")
    assert prepared is not None
    tokens = prepared.facts.train_tokens + prepared.facts.held_out_tokens
    assert plan.tokens == pytest.approx(tokens, rel=0.2)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert plan.disk == pytest.approx(sum(file.stat().st_size for file in files), rel=0.2)
    assert plan.memory > 10_000_000


def test_the_languages_of_the_documents(
    tmp_path: Path, run_mlbert: RunMlbert, monkeypatch: pytest.MonkeyPatch, assert_fails
) -> None:
    """Every tenth of three quarters German and a quarter French. No byte of the set depends on
    it.
    """
    pytest.importorskip("py3langid", reason="needs the extra languages")
    draw = random.Random(1)
    rows = []
    for number in range(1200):
        words = FRENCH if number % 4 == 0 else GERMAN
        rows.append(" ".join(draw.choices(words.split(), k=30)))
    write_rows(tmp_path / "text/a.jsonl", rows)
    command = ["prepare", "tokens", tmp_path / "text", "--tokenizer", "bert-base-uncased"]
    command += ["--workers", 1]
    status, output, errors = run_mlbert(*command, "--out", tmp_path / "named", "--languages")
    assert status == 0, output + errors
    found = re.search(r"languages of the documents: (\d+)% de, (\d+)% fr$", output, re.MULTILINE)
    assert found is not None, output
    assert int(found[1]) == pytest.approx(75, abs=12)
    assert f"{found[1]}% de, {found[2]}% fr" in (tmp_path / "named/report.html").read_text()
    assert run_mlbert(*command, "--out", tmp_path / "plain")[0] == 0
    assert "languages" not in (tmp_path / "plain/report.html").read_text()
    assert shards(tmp_path / "named") == shards(tmp_path / "plain")
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    again = [*command, "--out", tmp_path / "other", "--languages"]
    assert_fails(again, "package.missing", "--languages")


def shards(folder: Path) -> dict[str, bytes]:
    paths = [*folder.glob("train/*"), *folder.glob("val/*")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_memory_of_one_process_is_planned_within_a_fifth(tmp_path: Path) -> None:
    """For a full chunk of English sentences."""
    draw = random.Random(1)
    sentences = [sentence for document in python_text.documents() for sentence in document]
    rows = []
    while sum(map(len, rows)) < 1.2 * token_chunks.CHUNK_CHARACTERS:
        rows += [" ".join(draw.choices(sentences, k=30)) for _ in range(200)]
    write_rows(tmp_path / "text/a.jsonl", rows)
    words = ["prepare", "tokens", tmp_path / "text", "--tokenizer", "bert-base-uncased"]
    words += ["--out", tmp_path / "out", "--workers", "1"]
    said, _ = peak_of(*words, "--dry-run")
    planned = re.search(r"([\d.]+) GB of memory", said)
    assert planned is not None, said
    _, peak = peak_of(*words)
    assert float(planned[1]) == pytest.approx(peak / 1e9, rel=0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_further_process_takes_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_plain: bool
) -> None:
    """Of the tokenizer's vocabulary, the modules and the model of languages, all have one copy."""
    tokenizer = load_tokenizer("bert-base-uncased" if is_plain else byte_pairs(tmp_path))
    monkeypatch.setattr(executor, "_MOST_WORKERS", 100)
    draw = random.Random(1)
    words = [sentence for document in python_text.documents() for sentence in document]
    texts = [" ".join(draw.choices(words, k=100)) for _ in range(50)]

    def most(workers: int) -> int:
        """Return the most memory of the processes, each of which got some items."""
        found = 0
        items = [texts] * (3 * workers)
        with token_chunks.encoding(Executor(workers), tokenizer, False) as encode:
            for _ in encode(items):
                found = max(found, memory_of(descendants_of(os.getpid())).pss)
        return found

    growth = (most(12) - most(2)) / 10
    assert 1e6 < growth < MOST_OF_A_PROCESS


def byte_pairs(folder: Path) -> Path:
    """Write a tokenizer with 40,000 entries."""
    words = {
        word for document in python_text.documents() for text in document for word in text.split()
    }
    texts = [f"{first} {second}" for first, second in pairwise(sorted(words))]
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=40_000, special_tokens=list(SPECIAL_TOKENS))
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    path = folder / "tokenizer.json"
    made.save(str(path))
    return path


def peak_of(*words: object) -> tuple[str, int]:
    """Run ``mlbert``; return what it printed, and its peak memory in bytes."""
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", "mlbert", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    output, _, peak = done.stdout.rpartition(" ")
    return output, 1024 * int(peak)


def test_first_of_each_in_any_number_of_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(1)
    digests = draw.integers(0, 2**64, 300, dtype=np.uint64)
    digests[100:150] = digests[20:70]
    digests[-1] = digests[0] = np.uint64(2**64 - 1)
    parts = np.split(digests, [40, 40, 170])
    _, first = np.unique(digests, return_index=True)
    expected = np.zeros(300, bool)
    expected[first] = True
    for most in (7, 300, 1000):
        monkeypatch.setattr(kept_documents, "MOST_TOGETHER", most)
        assert np.array_equal(first_of_each(lambda: iter(parts), 300), expected), most


def test_what_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = tmp_path / "text"
    write_rows(text / "a.jsonl", made_documents(3)[:30])
    with user_error("data.too-small", "the text"):
        prepare_tokens(request_of(text, tokenizer), tmp_path / "small")
    write_rows(text / "a.jsonl", made_documents(3))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    with user_error("file.in-the-way", "other"):
        prepare_tokens(request_of(text, tokenizer), tmp_path / "other")
    (text / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with user_error("data.encoding", "a.jsonl"):
        prepare_tokens(request_of(text, tokenizer), tmp_path / "bad")
    assert read_facts(tmp_path / "bad") is None


def test_the_command_with_proportions_and_a_plan(
    tmp_path: Path, run_mlbert: RunMlbert, assert_fails
) -> None:
    write_rows(tmp_path / "de/a.jsonl", made_documents(4))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text"])
        writer.writerows(enumerate(made_documents(5)))
    out = tmp_path / "out"
    command = ["prepare", "tokens", tmp_path / "de", tmp_path / "rows.csv"]
    command += ["--tokenizer", "bert-base-uncased", "--out", out, "--workers", 1]
    status, output, errors = run_mlbert(*command, "--dry-run")
    assert status == 0, errors
    assert "MB/s with 1 worker" in output
    assert not out.exists()
    assert_fails([*command, "--proportions", "1"], "config.value", "--proportions")
    status, output, errors = run_mlbert(*command, "--proportions", "3,1")
    assert status == 0, output + errors
    exported = output.split("DATA_STREAMS='")[1].split("'")[0]
    streams = json.loads(exported)["streams"]
    assert [stream["proportion"] for stream in streams] == [0.75, 0.25]
    for stream in streams:
        assert len(MdsReader(Path(stream["local"]))) > DOCUMENTS / 2
    assert f"EVALDIR={out}/val TOKENIZER={out}" in output
    page = (out / "report.html").read_text()
    assert "rows.csv" in page
    assert "bytes per token" in page
    facts = read_facts(out)
    assert facts is not None
    assert sum(facts.proportions.values()) == 1
