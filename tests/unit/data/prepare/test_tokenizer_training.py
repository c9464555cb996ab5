"""Tokenizers of every kind: as transformers reads them, the same in every process, measured on text
that they were not trained on.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlbert.data.formats.added_words import add_words, read_words
from mlbert.data.formats.tokenizer import load_tokenizer
from mlbert.data.formats.wordpiece import SPECIAL_TOKENS
from mlbert.data.prepare import tokenizer_training
from mlbert.data.prepare.corpus_files import find_sources
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.tokenizer_folder import OWN_NAME, REPORT
from mlbert.data.prepare.tokenizer_text import TextCounts, TokenizerText, read_text, source_names
from mlbert.data.prepare.tokenizer_training import KINDS, train_tokenizer
from mlbert.host.progress import Progress
from programs import RunMlbert, write_files
from user_errors import assert_error_line, user_error

SIZE = 512
ODD = "Zażółć gęślą jaźń, 你好 мир!\n\tdef f(x): return x**2  # 🙂 don't"


def made_text(count: int, seed: int = 0) -> list[str]:
    """Return documents of words that follow each other by chance."""
    draw = random.Random(seed)
    syllables = ["ka", "to", "mi", "ren", "šu", "lö", "par", "ne", "vi", "ost"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(400)]
    documents = []
    for _ in range(count):
        chosen = draw.choices(words, k=60)
        chosen[::9] = [word.capitalize() for word in chosen[::9]]
        chosen[3::7] = [f"{word}," for word in chosen[3::7]]
        documents.append(f"{' '.join(chosen)}.")
    return documents


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": text}) for text in made_text(150)]
    write_files(
        folder, {"one/a.jsonl": "\n".join(lines), "two/b.txt": "\n\n".join(made_text(150, 1))}
    )
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_it(kind: str, texts: Path, tmp_path: Path, run_mlbert: RunMlbert):
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    status, printed, errors = run_mlbert(
        "prepare", "tokenizer", texts, "--kind", kind, "--size", SIZE, "--out", out, "--length", 128
    )
    assert status == 0, errors
    assert "one" in printed
    assert "two" in printed
    assert f"{SIZE} entries" in printed
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert len(tokenizer) == SIZE
    assert tokenizer.model_max_length == 128
    assert tokenizer.convert_tokens_to_ids([*SPECIAL_TOKENS]) == [0, 1, 2, 3, 4]
    library = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in (*made_text(3, 5), ODD):
        ids = tokenizer(text)["input_ids"]
        assert ids == library.encode(text).ids
        assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert (tokenizer.unk_token_id in ids) == (kind != "bpe" and text == ODD)
    pair = tokenizer("a", "b")["input_ids"]
    assert pair.count(tokenizer.sep_token_id) == 2
    masked = tokenizer(f"ka {tokenizer.mask_token}, to")["input_ids"]
    before = tokenizer("ka")["input_ids"][:-1]
    assert masked[: len(before) + 1] == [*before, tokenizer.mask_token_id], "no space between"
    masked = tokenizer(f"ka {tokenizer.mask_token} to", add_special_tokens=False)["input_ids"]
    after = tokenizer("ka to", add_special_tokens=False)["input_ids"][len(before) - 1 :]
    assert masked[len(before) :] == after, "the space belongs to the next word"
    text = made_text(1, 5)[0]
    decoded = tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True)
    assert decoded.replace(" ", "").casefold() == text.replace(" ", "").casefold()
    if kind != "wordpiece":
        assert decoded == text

    report = json.loads((out / REPORT).read_text())
    assert report["entries"] == SIZE
    entries = tokenizer.get_vocab()
    assert report["unused"] == sum(entry.startswith("[unused") for entry in entries)
    new = report["sources"]["one"]["measures"]["new"]
    assert 1 < new["tokens_per_word"] < 6
    assert new["unknown_share"] < 0.01


def test_the_same_bytes_in_every_process(texts: Path) -> None:
    """The library hashes words in another order in every process."""
    script = """
import hashlib, sys
from mlbert.data.prepare.tokenizer_training import KINDS, train_tokenizer
text = open(sys.argv[1]).read().splitlines()
for kind in KINDS:
    trained = train_tokenizer(kind, text, 1024)
    print(hashlib.sha256(trained.library.to_str().encode()).hexdigest(), trained.num_learnt)
"""
    made = {
        subprocess.run(
            [sys.executable, "-c", script, str(texts / "two/b.txt")],
            env=os.environ | {"RAYON_NUM_THREADS": str(threads)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for threads in (1, 2)
    }
    assert len(made) == 1, made


def test_any_number_of_processes_counts_the_same(
    texts: Path, said: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_training, "_TOGETHER", 1 << 13)
    monkeypatch.setattr(tokenizer_training, "_MOST_WORDS", 300)
    lines = (texts / "two/b.txt").read_text().splitlines()
    alone = train_tokenizer("wordpiece", lines, 1024)
    two = train_tokenizer("wordpiece", lines, 1024, executor=Executor(2, said))
    assert alone.library.to_str() == two.library.to_str()


def test_unused_entries_fill_up_the_size() -> None:
    for kind in KINDS:
        trained = train_tokenizer(kind, ["only a [few] words u n s e d 0 here"] * 20, 448)
        library = trained.library
        assert library.get_vocab_size() == 448
        assert library.id_to_token(447) == f"[unused{447 - trained.num_learnt}]"
        assert 447 not in library.encode("a [unused0] few").ids
        number = library.token_to_id("[unused0]")
        assert number == trained.num_learnt
        assert number not in library.encode("words [unused0] here").ids


def read(folder: Path, sample: int) -> TokenizerText:
    return read_text([folder], find_sources([folder], folder / "out"), sample)


def test_held_out_documents_are_not_trained_on(texts: Path) -> None:
    counts = TextCounts()
    text = read(texts, 10**9)
    trained = list(text.texts(counts))
    held_out = [document for group in text.groups.values() for document in group.held_out.texts]
    assert set(text.groups) == {"one", "two"}
    assert all(len(group.held_out.texts) >= 5 for group in text.groups.values())
    assert not set(trained) & set(held_out)
    total = sum(map(len, [*trained, *held_out]))
    assert total == text.characters
    assert counts.characters == sum(map(len, trained))
    assert counts.documents == len(trained)
    few = list(read(texts, text.characters // 4).texts(TextCounts()))
    assert set(few) < set(trained)
    assert sum(map(len, few)) == pytest.approx(text.characters / 4, rel=0.3)


def test_names_of_sources() -> None:
    folder = Path("/x/texts")
    files = [folder / "de/a/1.txt", folder / "fr/2.txt", folder / "3.txt"]
    assert [*source_names([folder], files).values()] == ["de", "fr", "texts"]
    two = [folder / "de", folder / "fr"]
    assert [*source_names(two, files[:2]).values()] == ["/x/texts/de", "/x/texts/fr"]
    many = [Path(f"/x/{number}.txt") for number in range(50)]
    assert {*source_names(many, many).values()} == {"all text"}


def test_compared_tokenizers(
    texts: Path, tmp_path: Path, run_mlbert: RunMlbert, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is called as the report calls the trained one."""
    monkeypatch.chdir(tmp_path)
    words = ["prepare", "tokenizer", texts / "one", "--size", 320]
    run_mlbert(*words, "--out", OWN_NAME)
    status, printed, _ = run_mlbert(*words[:-1], 640, "--out", "second", "--compare", OWN_NAME)
    assert status == 0, printed
    measures = json.loads(Path("second", REPORT).read_text())["sources"]["one"]["measures"]
    first = json.loads(Path(OWN_NAME, REPORT).read_text())["sources"]["one"]["measures"]
    assert measures[f"./{OWN_NAME}"] == first[OWN_NAME]
    assert measures[OWN_NAME]["bytes_per_token"] > first[OWN_NAME]["bytes_per_token"]


def test_what_is_refused(
    texts: Path,
    tmp_path: Path,
    assert_fails: Callable[..., str],
    run_mlbert: RunMlbert,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["prepare", "tokenizer", texts, "--out", tmp_path / "out"]
    assert_fails([*words, "--kind", "word"], "config.choice", "--kind word")
    assert_fails([*words, "--size", "1000"], "config.range", "--size")
    assert_fails([*words, "--size", "64"], "config.range", "--size")
    assert_fails([*words, "--cased"], "config.conflict", "--cased/--lower-case")
    large = ["--size", 1 << 17]
    assert_fails([*words, *large, "--kind", "wordpiece"], "config.range", "--size")
    assert_fails([*words, "--compare", tmp_path / "none.json"], "file.missing", "none.json")
    write_files(tmp_path, {"few/a.txt": "Too few.", "bad/a.txt": "x"})
    status, _, errors = run_mlbert(*words[:2], tmp_path / "few", *words[3:])
    assert status == 2
    assert_error_line(errors, "data.too-small", "the text")
    (tmp_path / "bad/a.txt").write_bytes(b"fine\ncaf\xe9\n")
    status, _, errors = run_mlbert(*words[:2], texts, tmp_path / "bad", *words[3:])
    assert status == 2
    assert_error_line(errors, "data.encoding", "bad/a.txt")
    status, printed, _ = run_mlbert(
        *words[:2], texts, tmp_path / "bad", "--size", 320, "--out", tmp_path / "o", "--skip-bad"
    )
    assert status == 0
    assert "skipped: " in printed
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*")), "nothing half-written"
    (tmp_path / "out").mkdir()
    (tmp_path / "out/x").touch()
    assert_fails(words, "file.exists", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert_fails([*words[:-1], "."], "file.exists", ".")
    chinese = " ".join(chr(0x4E00 + number) for number in range(400)) * 50
    with user_error("config.range", "--size"):
        train_tokenizer("unigram", [chinese], 320, executor=Executor())


def test_words_that_save_most(
    texts: Path, tmp_path: Path, run_mlbert: RunMlbert, assert_fails: Callable[..., str]
) -> None:
    run_mlbert("prepare", "tokenizer", texts, "--size", 512, "--out", tmp_path / "old")
    words = ["prepare", "words", texts, "--tokenizer", tmp_path / "old", "--number", 20]
    words += ["--out", tmp_path / "new/words.txt"]
    status, printed, errors = run_mlbert(*words)
    assert status == 0, errors
    assert "words.txt: 20 words" in printed
    chosen = read_words(tmp_path / "new/words.txt")
    assert len(chosen) == 20
    old = load_tokenizer(tmp_path / "old")
    text = " ".join([*made_text(150), *made_text(150, 1)])
    counts = [len(re.findall(rf"\b{word}\b", text)) for word in chosen]
    pieces = [len(old.encode(f" {word}")) for word in chosen]
    saved = [count * (number - 1) for count, number in zip(counts, pieces, strict=True)]
    assert min(saved) > 0
    assert sum(saved[:5]) > sum(saved[-5:])
    added = add_words(old, chosen)
    assert len(added.pieces) == 20
    assert len(added.library.encode(text).ids) < len(old.encode(text))
    assert_fails(words, "file.exists", "words.txt")


@pytest.mark.slow
def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C ends the library's own work at once, and leaves nothing."""
    draw = random.Random(0)
    lines = [
        " ".join("".join(draw.choices("abcdefghij", k=9)) for _ in range(60)) for _ in range(6000)
    ]
    (tmp_path / "a.txt").write_text("\n\n".join(lines))
    words = ["prepare", "tokenizer", tmp_path / "a.txt", "--kind", "unigram"]
    words += ["--size", 8192, "--out", tmp_path / "out"]
    with subprocess.Popen(
        [sys.executable, "-m", "mlbert", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("training: "):  # all text is read
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
