"""``mlbert pretrain TEXT``: interrupted, continued, made longer; the model that it leaves;
what is refused.
"""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from programs import RunMlbert, wait_for, write_files
from user_errors import assert_error_line

pytestmark = pytest.mark.usefixtures("one_cpu")

WORDS = [
    ["The old", "A young", "Every"],
    ["river", "teacher", "engine", "window"],
    ["finds", "builds", "paints"],
]
WORDS += [
    ["the"],
    ["house", "letter", "garden", "market"],
    ["slowly.", "twice today.", "again and again."],
]
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(1)
    path = tmp_path_factory.mktemp("text") / "my text.txt"
    words = [
        [*map(draw.choice, WORDS), f"Number {draw.randrange(10**6)} follows."] for _ in range(2500)
    ]
    path.write_text(
        "".join(" ".join(line) + ("\n\n" if n % 5 == 4 else "\n") for n, line in enumerate(words))
    )
    return path


@pytest.fixture
def run(run_mlbert: RunMlbert) -> Run:
    def run(*words: object) -> tuple[int, str]:
        status, out, err = run_mlbert("pretrain", *words)
        return status, out + err

    return run


def test_interrupted_resumed_and_extended(
    text: Path, tmp_path: Path, run: Run, monkeypatch
) -> None:
    out = tmp_path / "out"
    words = [text, "--out", out, "--size", "tiny"]
    command = [sys.executable, "-m", "mlbert", "pretrain", *map(str, words), "--minutes", "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = out / "run_0/metrics.jsonl"
    wait_for(
        lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size > 0), 120
    )
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "a checkpoint is saved. Run the same command to resume." in output
    assert "mlbert: interrupted" not in output, "one line"
    assert not (out / "model").exists()

    status, output = run(*words, "--minutes", "0.05")
    assert status == 0, output
    assert "was interrupted; resuming" in output
    assert "resumed at step" in output
    assert "finished: held-out accuracy" in output
    assert output.count("[MASK]") >= 10
    assert f"mlbert fill-mask {out}/model" in output
    assert output.endswith(f"mlbert finetune --from {out}/model --train FILE.csv\n")
    assert not list(out.glob("result_*")), "no MLPerf log"
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    model = AutoModelForMaskedLM.from_pretrained(out / "model")
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 128, "as trained"
    card = (out / "model/README.md").read_text()
    assert all(f in card for f in ("2 layers x 128", "100% Latin", "Guessing")), card
    assert tokenizer("The HOUSE")["input_ids"] == tokenizer("the house")["input_ids"]
    assert "held-out text are predicted" in (out / "report.html").read_text()
    trained = json.loads((out / "run_0/summary.json").read_text())

    status, output = run(*words, "--minutes", "0.05")
    assert (status, "is finished" in output) == (0, True)
    monkeypatch.chdir(tmp_path)
    longer = [text, "--out", "out", "--minutes", 2 * trained["seconds_to_train"] / 60, "--mlperf"]
    status, output = run(*longer)
    assert (status, "[run.other-settings]" in output) == (2, True)
    status, output = run(*longer, "--size", "tiny")
    assert status == 0, output
    assert "is finished and will be extended" in output
    longer = json.loads((out / "run_0/summary.json").read_text())
    assert longer["steps"] > trained["steps"]
    assert longer["seconds_to_train"] > 1.5 * trained["seconds_to_train"]
    assert "run_stop" in (out / "result_0.txt").read_text()

    go_on_with_more_text(text, out, tmp_path, run)


def go_on_with_more_text(text: Path, out: Path, tmp_path: Path, run: Run) -> None:
    """Train on another file, from the model that was made, with its vocabulary,
    as transformers saves it.
    """
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    (tmp_path / "new.txt").write_text("More text.")
    more = [text, tmp_path / "new.txt"]
    status, output = run(*more, "--out", out, "--size", "tiny", "--minutes", "0.05")
    assert status == 2
    assert f"1 added (new.txt). To continue from its weights, give --from {out}/model" in output
    AutoModelForMaskedLM.from_pretrained(out / "model").save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(out / "model").save_pretrained(tmp_path / "again")
    status, output = run(
        *more, "--out", tmp_path / "more", "--from", tmp_path / "again", "--minutes", "0.05"
    )
    assert status == 0, output
    assert "starting from a model: 2 layers x 128" in output
    before = float(output.split("before training: held-out accuracy ")[1].split()[0])
    assert before > 0.05
    assert (tmp_path / "more/model/vocab.txt").read_bytes() == (
        out / "model/vocab.txt"
    ).read_bytes()


def test_mended_text_starts_again_where_nothing_was_trained(
    text: Path, tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "texts"
    write_files(folder, {"good.txt": text.read_text()})
    (folder / "bad.txt").write_bytes(b"\xff")
    out = tmp_path / "out"
    words = [folder, "--out", out, "--size", "tiny", "--minutes", "0.05"]
    status, output = run(*words)
    assert status == 2
    assert not out.exists()
    assert f"{folder / 'bad.txt'}: line 1 is not UTF-8. Convert" in output
    (folder / "rows.csv").write_text('id,body\n1,"some,\nmore"\n')
    status, output = run(folder, "--skip-bad", "--dry-run", "--text", "body")
    assert (status, "files: 2 read (1 .txt, 1 .csv, column body); skipped:" in output) == (0, True)
    (folder / "bad.txt").write_text("mended")
    status, output = run(*words)
    assert status == 0, output
    assert (out / "model").is_dir()


@pytest.mark.parametrize("is_there", [False, True])
def test_too_little_text_leaves_nothing(
    text: Path, tmp_path: Path, run: Run, is_there: bool
) -> None:
    folder = write_files(tmp_path / "texts", {"a.txt": "The river is long.\n\nIt is wide."})
    out = tmp_path / "out"
    if is_there:
        out.mkdir()
    words = [folder, "--out", out, "--size", "tiny", "--minutes", "0.05"]
    for content, code in (
        (None, "data.too-small"),
        ("The river is long and wide.\n\n" * 2000, "data.repetitive"),
    ):
        if content is not None:
            (folder / "a.txt").write_text(content)
        status, output = run(*words)
        assert (status, f"[{code}]" in output) == (2, True), output
        assert out.exists() == is_there
        assert not is_there or not list(out.iterdir())
    (folder / "b.txt").write_text(text.read_text())
    status, output = run(*words)
    assert status == 0, output
    assert (out / "model").is_dir()


@pytest.mark.parametrize(
    ("words", "code", "subject"),
    [
        (["TEXT"], "config.missing", "--out"),
        (["TEXT", "--out", "OUT", "--minutes", "0"], "config.range", "--minutes 0"),
        (["TEXT", "--out", "OUT", "--minutes", "1e9"], "config.range", "--minutes 1e+09"),
        (["TEXT", "--out", "OUT", "--minutes", "nan"], "config.value", "--minutes"),
        (["TEXT", "--out", "OUT", "--hours", "-1"], "config.range", "--hours -1"),
        (
            ["TEXT", "--out", "OUT", "--hours", "1", "--minutes", "1"],
            "config.conflict",
            "--minutes and --hours",
        ),
        (["TEXT", "--out", "TEXT"], "file.wrong-kind", "TEXT"),
        (["TEXT", "--out", "FOLDER"], "file.in-the-way", "FOLDER"),
        (["TEXT", "--out", "TEXT/below"], "file.unwritable", "TEXT/below"),
        (["TEXT", "--out", "OUT", "--vocab", "TEXT"], "vocabulary.format", "TEXT"),
        (["TEXT", "--out", "OUT", "--vocab", "nope.txt"], "file.missing", "nope.txt"),
        (["TEXT", "--out", "OUT", "--from", "FOLDER"], "checkpoint.missing", "FOLDER"),
        (["TEXT", "--out", "OUT", "--vocab-size", "5"], "config.range", "--vocab-size"),
        (["TEXT", "--out", "OUT", "--encoding", "hex"], "config.choice", "--encoding hex"),
        (
            ["TEXT", "--out", "OUT", "--cased", "--vocab", "TEXT"],
            "config.conflict",
            "--cased/--lower-case",
        ),
        (["nope.txt", "--out", "OUT"], "file.missing", "nope.txt"),
        (["nope.yaml"], "file.unreadable", "nope.yaml"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], code: str, subject: str, text, tmp_path, run
) -> None:
    folder = write_files(tmp_path / "folder", {"thesis.doc": "mine"})
    places = {"TEXT": str(text), "OUT": str(tmp_path / "out"), "FOLDER": str(folder)}
    for name, place in places.items():
        words = [word.replace(name, place) for word in words]
        subject = subject.replace(name, place)
    status, found = run(*words)
    assert status == 2, found
    assert_error_line(found, code, subject)
    assert [path.name for path in folder.iterdir()] == ["thesis.doc"]
