"""The command: help is complete, mistakes are one line with exit code 2, a bug keeps its traceback."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from mlbert.cli.main import COMMANDS, main
from mlbert.core.settings import train_settings
from training_settings import train_arguments


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def run_program(program, **words):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, **words)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"], ["--version"], ["--show-completion", "bash"]])
def test_the_command_itself_imports_nothing_heavy(arguments):
    program = f"import sys; sys.argv = ['mlbert', *{arguments}]\nfrom mlbert.cli.main import main\ntry: main()\n"
    program += "except SystemExit: print({'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules))"
    assert run_program(program).stdout.splitlines()[-1] == "set()"


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert run(capsys, "help") == run(capsys, "-h") == (code, out, "")


def commands_of(name):
    made = get_command(importlib.import_module(COMMANDS[name][0]).app)
    return [[name], *([name, one] for one in made.commands)] if isinstance(made, TyperGroup) else [[name]]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_of_one_look(capsys, name):
    for words in commands_of(name):
        code, out, err = run(capsys, *words, "--help")
        assert (code, err) == (0, "")
        assert out.startswith(f"Usage: mlbert {' '.join(words)} ")
        assert "-h, --help" in out
        assert not set("│╭─") & set(out)
        assert "completion" not in out
        assert not re.search(r"\w\.\.\.\n", out.partition("Commands:")[2])  # cut short
    assert run(capsys, *words, "-h") == (code, out, err)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_group_alone_shows_its_commands(capsys, name):
    if len(commands_of(name)) > 1:
        code, out, err = run(capsys, name)
        assert (code, err) == (2, "")
        assert out == run(capsys, name, "--help")[1]


def test_the_version_has_a_short_form(capsys):
    code, out, _ = run(capsys, "-V")
    assert (code, out.split()[0]) == (0, "mlbert")
    assert run(capsys, "--version") == (code, out, "")


def test_the_package_is_the_command():
    result = subprocess.run([sys.executable, "-m", "mlbert", "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("Usage: mlbert")


def bash(script, home):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "HOME": str(home)}
    done = subprocess.run(["bash", "--norc", "-c", script], env=variables, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mlbert rep", {"report"}),
        ("mlbert convert hf", {"hf-to-torch"}),
    ],
)
def test_bash_completes_what_is_installed(tmp_path, typed, offered):
    if typed == "mlbert rep":
        assert bash("mlbert --show-completion bash | bash -n", tmp_path) == ""
    press = f"COMP_WORDS=({typed}); COMP_CWORD={len(typed.split()) - 1}; _mlbert_completion mlbert"
    found = bash(f'mlbert --install-completion bash >&2; . ~/.bashrc; {press}; echo "${{COMPREPLY[*]}}"', tmp_path)
    assert set(found.split()) == offered


def test_train_help_names_every_setting(capsys):
    _, out, _ = run(capsys, "train", "--help")
    squeezed = "".join(out.split())
    for row in train_settings().values():
        assert row.flag in squeezed
        assert f"export{row.env};" in squeezed
    assert squeezed.count("default:") + squeezed.count(";required") >= len(train_settings())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "Did you mean 'train', 'pretrain'? See mlbert --help."),
        (["xyz"], "No such command 'xyz'. See mlbert --help."),
        (["prepare", "txt"], "Did you mean 'text'? See mlbert prepare --help."),
        (["mosaic", "a=b"], "no YAML file"),
        (["finetune"], "no YAML file"),
        (["finetune", "--predict", "x.csv"], "--model"),
        (["glue", "--bogus"], "--bogus"),
        (["--show-completion", "csh"], "bash"),
        (["train"], "RECIPE"),
        (["train", "--recipe"], "--recipe"),
        (["train", "--samples-per-second", "5"], "--print-config"),
        (["train", "--print-config", "--samples-per-second=fast"], "'fast' is not a number"),
        (["submission", "new-system", "a-b", "--from", "h200_n1"], "no legal name"),
        (["report", "/nowhere"], "/nowhere"),
        (["report", "/no\x1b[31mwhere"], "/no\N{REPLACEMENT CHARACTER}[31mwhere"),
        (["convert", "hf-to-torch", "/nowhere", "/tmp/mlbert-nowhere"], "/nowhere"),
        (["bench", "step", "--pairs", "1"], "--pairs"),
        (["bench", "step", "--config", "huge"], "huge"),
        (["bench", "step", "--precision", "fp4"], "fp4"),
        (["bench", "step", "--packs", "0"], "--packs"),
        (["bench", "step", "--bogus", "1"], "--bogus"),
        (["convert", "hf-to-torch"], "source"),
        (["submission", "check", "/nowhere"], "/nowhere"),
        (["prepare", "text", "--input", "/nowhere", "--out", "/tmp/mlbert-nowhere"], "/nowhere"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(capsys, monkeypatch, arguments, named):
    monkeypatch.delenv("RECIPE", raising=False)
    code, _, error = run(capsys, *arguments)
    assert code == 2
    assert error.count("\n") == 1
    assert error.startswith("mlbert: error: ")
    assert named in error


def test_debug_adds_the_traceback(capsys):
    code, _, error = run(capsys, "report", "/nowhere", "--debug")
    assert code == 2
    assert "Traceback" in error


def test_no_command_shows_the_help_and_fails(capsys):
    code, out, _ = run(capsys)
    assert code == 2
    assert "Usage" in out


def test_print_config_shows_the_plan_and_trains_nothing(tmp_path, capsys):
    code, out, _ = run(capsys, *train_arguments(tmp_path), "--print-config")
    assert code == 0
    assert "LR=0.01  (learning_rate, flag --learning_rate)" in out
    assert "global_batch_size 6 = BATCHSIZE 4 x 1 ranks x PACKING_FACTOR 1.5" in out
    assert "closed division: every 150,000, on 10,000" in out
    assert "expected samples: unknown" in out
    assert "data and model shape: synthetic" in out
    assert not (tmp_path / "out").exists()


def test_print_config_checks_what_training_would(tmp_path, capsys, prepared_data):
    entries = len((prepared_data / "vocab.txt").read_text().splitlines())
    fitting = {"vocab_size": entries, "max_position_embeddings": 32}
    data = {"synthetic_data": 0, "input_dir": prepared_data / "train", "eval_dir": prepared_data / "eval"}
    (tmp_path / "done/run_0").mkdir(parents=True)
    (tmp_path / "done/run_0/summary.json").write_text("{}")
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for name, changes, named in [
        ("out", {}, None),
        ("out", {"shape": {**fitting, "vocab_size": 300}}, "has a vocabulary of"),
        ("out", {"input_dir": tmp_path / "none"}, "none"),
        ("out", {"init_checkpoint": tmp_path / "file"}, "neither a safetensors"),
        ("out", {"cpu_threads": 4000}, "CPU_THREADS=4000"),
        ("done", {}, "holds a finished run"),
        ("file", {}, "cannot be written"),
        ("done", {"init_checkpoint": tmp_path / "file"}, "neither a safetensors"),
    ]:
        words = train_arguments(tmp_path, name, **{**data, "shape": fitting, **changes})
        code, out, err = run(capsys, *words, "--print-config")
        assert (code, err.count("\n")) == ((0, 0) if named is None else (2, 1)), (name, changes, err)
        assert named is None or (named in err and err.removeprefix("mlbert: error: ").strip() in out)
        assert "global_batch_size" in out
        (tmp_path / "bert_config.json").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_without_permission_is_one_line(capsys, monkeypatch, tmp_path):
    def refused(*_):
        raise PermissionError(13, "Permission denied", "secret.txt")

    monkeypatch.setattr("mlbert.cli.prepare.wiki.recognise", refused)
    code, _, err = run(capsys, "prepare", "recognise", str(tmp_path))
    assert (code, err) == (2, "mlbert: error: secret.txt: Permission denied. Check its permissions.\n")


def test_ctrl_c_while_a_command_works_is_one_line(capsys, monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mlbert.cli.prepare.wiki.recognise", interrupted)
    code, _, err = run(capsys, "prepare", "recognise", str(tmp_path))
    assert (code, err) == (130, "mlbert: interrupted\n")
