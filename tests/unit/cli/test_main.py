"""The command: help is complete, mistakes are one line with exit code 2, a bug keeps its traceback."""

import subprocess
import sys

import pytest

from mlbert.cli.main import COMMANDS, main
from mlbert.core.settings import train_settings
from training_settings import train_arguments


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    captured = capsys.readouterr()
    return end.value.code, captured.out, captured.err


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)


def test_help_needs_no_torch():
    program = "import sys; sys.argv = ['mlbert', '--help']\nfrom mlbert.cli.main import main\ntry: main()\n"
    program += "except SystemExit: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_command_has_help(capsys, command, flag):
    code, out, _ = run(capsys, command, flag)
    assert code == 0
    assert f"mlbert {command}" in out


@pytest.mark.parametrize("command", ["prepare", "convert", "submission", "bench", "launch"])
def test_a_group_alone_shows_its_commands(capsys, command):
    code, out, err = run(capsys, command)
    assert (code, err) == (2, "")
    assert "Commands" in out


def test_the_version_has_a_short_form(capsys):
    assert run(capsys, "-V") == run(capsys, "--version")


def test_the_package_is_the_command():
    result = subprocess.run([sys.executable, "-m", "mlbert", "--help"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("Usage: mlbert")


def test_train_help_names_every_setting(capsys):
    _, out, _ = run(capsys, "train", "--help")
    squeezed = "".join(out.split())
    for row in train_settings().values():
        assert row.flag in squeezed
        assert f"export{row.env}" in squeezed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "train"),
        (["xyz"], "See mlbert --help"),
        (["train"], "RECIPE"),
        (["train", "--recipe"], "--recipe"),
        (["train", "--samples-per-second", "5"], "--print-config"),
        (["train", "--print-config", "--samples-per-second=fast"], "'fast' is not a number"),
        (["submission", "new-system", "a-b", "--from", "h200_n1"], "no legal name"),
        (["report", "/nowhere"], "/nowhere"),
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


def test_print_config_needs_no_data_and_trains_nothing(tmp_path, capsys):
    code, out, _ = run(capsys, *train_arguments(tmp_path), "--print-config")
    assert code == 0
    assert "LR=0.01  (learning_rate, flag --learning_rate)" in out
    assert "global_batch_size 6 = BATCHSIZE 4 x 1 ranks x PACKING_FACTOR 1.5" in out
    assert "closed division: every 150,000, on 10,000" in out
    assert "expected samples: unknown" in out
    assert not (tmp_path / "out").exists()


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
