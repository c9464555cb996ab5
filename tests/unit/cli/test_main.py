"""The command: help is complete, mistakes are one line with exit code 2,
a bug keeps its traceback.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from typer.main import get_command

from mlbert.cli.main import COMMANDS
from mlbert.recipes.registry import RECIPES
from mlbert.recipes.sections import settings_by_key
from programs import exports_of, run_checked, run_quietly, write_files
from training_settings import train_arguments
from user_errors import assert_error_line

HEAVY = {"torch", "tensorflow", "transformers", "matplotlib", "scipy"}
PROGRAM = """
import json, sys
from mlbert.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit:
        print("ended")
print(*sys.modules)
"""


def test_help_mistakes_and_a_plan_import_no_heavy_library(tmp_path, tree_root):
    """Unless starting weights must be opened, a plan reads the data with numpy alone."""
    demo = exports_of(
        tree_root / "benchmarks/bert/implementations/cpu_demo/config_cpu_1x1x32x1_demo.sh"
    )
    alone = [[], ["--help"], ["-h"], ["help"], ["--version"], ["--show-completion", "bash"]]
    plan = ["train", "--print-config", "--synthetic_data", "1", "--output_dir", str(tmp_path)]
    for commands, heavy, said in (
        (alone, HEAVY | {"numpy", "rich"}, "Usage: mlbert"),
        ([["train", "--help"]], HEAVY, "Usage: mlbert train"),
        ([["train", "--seeed=1"]], HEAVY, "[config.unknown-name]"),
        ([plan], HEAVY, "data and model shape: synthetic"),
    ):
        done = run_quietly(
            sys.executable, "-c", PROGRAM, json.dumps(commands), env=os.environ | demo
        )
        lines = done.stdout.splitlines()
        assert lines.count("ended") == len(commands)
        assert not heavy & set(lines[-1].split()), commands
        assert said in done.stdout + done.stderr


def test_help_names_every_command_and_has_short_forms(run_mlbert):
    code, out, _ = run_mlbert("--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert run_mlbert("help") == run_mlbert("-h") == (code, out, "")
    assert run_mlbert() == (2, out, "")
    code, out, _ = run_mlbert("-V")
    assert (code, out.split()[0]) == (0, "mlbert")
    assert run_mlbert("--version") == (code, out, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_of_one_look(run_mlbert, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    made = get_command(COMMANDS[name].load())
    commands = [[name], *([name, one] for one in getattr(made, "commands", ()))]
    for words in commands:
        code, out, err = run_mlbert(*words, "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"Usage: mlbert {' '.join(words)} ")
        assert "-h, --help" in out
        assert not set("│╭─") & set(out)
        assert max(map(len, out.splitlines())) <= 80
        # Types and ranges as Python writes them.
        assert not re.search(r"<(int|float|path|list|str)|list\[|x[<>]=", out)
        assert "completion" not in out
        inner = made if made.name == name or len(words) == 1 else made.commands[words[1]]
        is_group = hasattr(inner, "commands")
        assert is_group or inner.hidden or "Examples:" in out
        assert not re.search(r"\w\.\.\.\n", out.partition("Commands:")[2])  # cut short
    assert run_mlbert(*words, "-h") == (code, out, err)
    if len(commands) > 1:
        assert run_mlbert(name) == (2, run_mlbert(name, "--help")[1], "")


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_have_options_that_exist(run_mlbert, name):
    made = get_command(COMMANDS[name].load())
    for inner in getattr(made, "commands", {"": made}).values():
        if inner.hidden:
            continue
        examples = (inner.help or "").partition("Examples:\n")[2]
        for line in examples.splitlines():
            *_, command = line.strip().split(" && ")
            program, *words = shlex.split(command)
            assert program == "mlbert"
            if name != "launch" and words[:2] == ["launch", "local"]:  # -n N, then the command
                words = words[4:]
            assert " ".join(words).startswith(f"{name} {inner.name if inner is not made else ''}")
            _, help_text, _ = run_mlbert(*words[: 1 if inner is made else 2], "--help")
            options = [word for word in words if word.startswith("--")]
            assert all(re.search(rf"{option}\b", help_text) for option in options), line


def test_number_ranges_of_help_are_in_words(run_mlbert):
    _, out, _ = run_mlbert("plan", "--help")
    squeezed = " ".join(out.split())
    assert "--gpus N Number of GPUs. [1 to 8,192]" in squeezed
    assert "[1,000 to 1e12]" in squeezed
    assert "[at least 1]" in squeezed
    assert "[0.01 to 2]" in squeezed


def bash(script, home):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "HOME": str(home)}
    return run_checked("bash", "--norc", "-c", script, env=variables).stdout


def test_bash_completion_is_installed(tmp_path):
    assert bash("mlbert --show-completion bash | bash -n", tmp_path) == ""
    bash("mlbert --install-completion bash", tmp_path)
    for typed, offered in (("mlbert rep", "report"), ("mlbert convert hf", "hf-to-torch")):
        press = (
            f"COMP_WORDS=({typed}); COMP_CWORD={len(typed.split()) - 1}; _mlbert_completion mlbert"
        )
        assert bash(f'. ~/.bashrc; {press}; echo "${{COMPREPLY[*]}}"', tmp_path) == f"{offered}\n"


def test_train_help_names_every_setting(run_mlbert):
    """But for those that only TensorFlow reads."""
    _, out, _ = run_mlbert("train", "--help")
    squeezed = "".join(out.split())
    rows = {
        row
        for row in settings_by_key().values()
        if any(recipe.reads(row) for recipe in RECIPES.values())
    }
    for row in settings_by_key().values():
        assert (
            (f"{row.flag}VALUE" in squeezed) == (f"export{row.env};" in squeezed) == (row in rows)
        )
    assert squeezed.count("default:") + squeezed.count(";required") >= len(rows)


def test_train_help_has_the_groups_of_the_settings_page(run_mlbert):
    _, out, _ = run_mlbert("train", "--help")
    titles = re.findall(r"^(\w.*):$", out, re.MULTILINE)
    assert titles[0] == "Options"
    page = Path(__file__).parents[3] / "docs/settings.md"
    on_page = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
    assert titles[1:] == [title for title in on_page if title in titles]
    optimizer = out.split("\nOptimizer:\n")[1].split("\n\n")[0]
    assert "--weight-decay-rate" in optimizer
    assert "--input-dir" not in optimizer


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "trian: is an unknown command. Did you mean train or pretrain? ["),
        (["prepare", "txt"], "txt: is an unknown command. Did you mean text? ["),
        (["--show-completion", "csh"], "--show-completion"),
        (["bench", "step", "--packs", "0"], "--packs"),
        (["convert", "hf-to-torch"], "SOURCE: is missing. See mlbert convert hf-to-torch --help."),
        (["convert", "hf-to-torch", "a", "b", "c", "d"], "c d: is one argument too many."),
        (["prepare", "pack", "--input"], "--input: has no value. Write --input VALUE."),
        (["pretrain", "a", "--dry-run=3"], "--dry-run: takes no value. Write --dry-run alone."),
        (
            ["pretrain", "a", "--dry-rnu"],
            "is an unknown option. Did you mean --dry-run?",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(run_mlbert, arguments, named):
    code, _, error = run_mlbert(*arguments)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith("mlbert: error: ")
    assert named in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "step", "--pairs", "2"], "--pairs: '2' is wrong, it must be at least 5."),
        (["bench", "step", "--pairs", "x"], "--pairs: 'x' is wrong, it must be a whole number."),
        (["pretrain", "a", "--minutes", "x"], "--minutes: 'x' is wrong, it must be a number."),
        (["launch", "chain", "0", "run.sub"], "N: '0' is wrong, it must be at least 1."),
        (["launch", "local", "--master_port", "99999", "a.py"], "it must be at most 65535."),
        (
            ["bench", "step", "--precision", "onnx"],
            "--precision: 'onnx' is not a choice. Choices: auto, fp32, bf16.",
        ),
    ],
)
def test_a_wrong_value_is_named_in_plain_words(run_mlbert, arguments, words):
    code, _, error = run_mlbert(*arguments)
    assert (code, error.count("\n")) == (2, 1)
    assert words in error
    for jargon in ("Input should", "Value error", "unable to parse", "greater than"):
        assert jargon not in error


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["fill_mask", "--help"], ["fill-mask", "--help"]),
        (["pretrain", "/nowhere", "--dry_run"], ["pretrain", "/nowhere", "--dry-run"]),
        (
            ["launch", "local", "--world_size", "3", "-n", "2", "a.py"],
            ["launch", "local", "--world-size", "3", "-n", "2", "a.py"],
        ),
        (["train", "--max_seconds", "x"], ["train", "--max-seconds", "x"]),
    ],
)
def test_underscores_and_dashes_are_the_same(run_mlbert, typed, meant):
    assert run_mlbert(*typed) == run_mlbert(*meant)


@pytest.mark.parametrize(
    ("arguments", "code", "subject"),
    [
        (["mosaic", "a=b"], "config.missing", "main.py"),
        (["finetune"], "config.missing", "mlbert finetune"),
        (["finetune", "--predict", "x.csv"], "config.conflict", "--predict"),
        (["glue", "--bogus"], "config.unknown-name", "--bogus"),
        (["train", "--recipe"], "config.syntax", "--recipe"),
        (["train", "--samples-per-second", "5"], "config.conflict", "--samples-per-second"),
        (
            ["train", "--print-config", "--samples-per-second=fast"],
            "config.value",
            "--samples-per-second",
        ),
        (["report", "/no\x1b[31mwhere"], "file.missing", "/no\N{REPLACEMENT CHARACTER}[31mwhere"),
        (
            ["convert", "hf-to-torch", "/nowhere", "/tmp/mlbert-nowhere"],
            "file.unreadable",
            "/nowhere/config.json",
        ),
        (["bench", "step", "--config", "huge"], "file.unreadable", "huge"),
        (
            ["prepare", "text", "--input", "/nowhere", "--out", "/tmp/mlbert-nowhere"],
            "file.missing",
            "/nowhere",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(assert_fails, arguments, code, subject):
    assert_fails(arguments, code, subject)


def test_a_terminal_shows_the_code_of_an_error_as_a_link(tree_root, tmp_path):
    """The page has the link's anchor, which is the code without its dot."""
    typescript = tmp_path / "typescript"
    words = [sys.executable, "-m", "mlbert", "report", str(tmp_path / "none")]
    subprocess.run(
        ["script", "--quiet", "--return", "--command", shlex.join(words), typescript],
        stdout=subprocess.DEVNULL,
        check=False,
        env={**os.environ, "TERM": "xterm"},
    )
    address = re.search(r"\x1b\]8;;([^\x1b]+)\x1b\\file\.missing\x1b\]8;;", typescript.read_text())
    assert address is not None, typescript.read_text()
    page, _, anchor = address[1].partition("#")
    assert page.startswith(tree_root.as_uri())
    assert anchor == "filemissing"
    assert "### `file.missing`" in (tree_root / "docs/errors.md").read_text()
    done = run_quietly(*words)
    assert "\x1b" not in done.stderr


def test_train_names_all_settings_that_are_missing(run_mlbert, monkeypatch):
    monkeypatch.delenv("RECIPE", raising=False)
    status, _, error = run_mlbert("train")
    assert (status, error.count("\n")) == (2, 1)
    assert "RECIPE (--recipe)" in error
    assert error.endswith("[config.missing]\n")
    assert "Traceback" in run_mlbert("train", "--debug")[2]


def test_print_config_shows_the_plan_checks_what_training_would_and_trains_nothing(
    tmp_path, run_mlbert, prepared_data
):
    entries = len((prepared_data / "vocab.txt").read_text().splitlines())
    fitting = {"vocab_size": entries, "max_position_embeddings": 32}
    data = {
        "synthetic_data": 0,
        "input_dir": prepared_data / "train",
        "eval_dir": prepared_data / "eval",
    }
    write_files(tmp_path, {"done/run_0/summary.json": "{}", "file": ""})
    before = sorted(tmp_path.rglob("*"))
    for name, changes, expected, subject in [
        ("out", {}, None, None),
        (
            "out",
            {"shape": {**fitting, "vocab_size": 300}},
            "data.model-mismatch",
            prepared_data / "train",
        ),
        ("out", {"input_dir": tmp_path / "none"}, "file.missing", tmp_path / "none"),
        ("out", {"init_checkpoint": tmp_path / "file"}, "checkpoint.format", tmp_path / "file"),
        ("out", {"cpu_threads": 4000}, "config.range", "CPU_THREADS=4000"),
        ("done", {}, "run.exists", tmp_path / "done/run_0"),
        ("file", {}, "file.unwritable", tmp_path / "file"),
        ("done", {"init_checkpoint": tmp_path / "file"}, "checkpoint.format", tmp_path / "file"),
    ]:
        settings = {**data, "shape": fitting, **changes}
        words = train_arguments(tmp_path, name, **settings)
        code, out, err = run_mlbert(*words, "--print-config")
        assert code == (2 if expected else 0), (name, changes, err)
        if expected:
            wording = subject != "CPU_THREADS=4000"  # names this machine's CPUs
            assert_error_line(err, expected, subject, wording=wording)
            assert err.removeprefix("mlbert: error: ").removesuffix(f" [{expected}]\n") in out
        else:
            assert not err
        assert "LR=0.01  (learning_rate, flag --learning-rate)" in out
        assert "global_batch_size 6 = BATCHSIZE 4 x 1 ranks x PACKING_FACTOR 1.5" in out
        assert "closed division: every 150,000, on 10,000" in out
        assert "expected samples: unknown" in out
        (tmp_path / "bert_config.json").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_exceptions_of_a_working_command_are_one_line(run_mlbert, tmp_path):
    for error, status, message in (
        (
            PermissionError(13, "Permission denied", "x"),
            2,
            "error: x: Permission denied. Check its permissions.",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ):
        with mock.patch("mlbert.cli.prepare.wiki.recognize", side_effect=error):
            code, _, err = run_mlbert("prepare", "recognize", tmp_path)
        assert (code, err) == (status, f"mlbert: {message}\n")
