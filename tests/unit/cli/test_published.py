"""Mistakes on the command lines of published programs are reported in our words."""

import pytest

from mlbert.cli.published import Parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--source, --length: are missing. See program.py --help. [config.missing]"),
        ("--source x", "--length: is missing. See program.py --help. [config.missing]"),
        ("--source", "--source: has no value. Write --source VALUE. [config.syntax]"),
        (
            "--source x --length 2.5",
            "--length: '2.5' is not a whole number. See program.py --help. [config.value]",
        ),
        (
            "--source x --length 2 --form round",
            "--form: 'round' is not a choice. Choices: flat, deep. [config.choice]",
        ),
        (
            "--source x --length 2 --what",
            "--what: is unknown. See program.py --help. [config.unknown-name]",
        ),
    ],
)
def test_a_mistake_is_one_line_and_status_two(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = Parser("program.py", "A program.")
    parser.add_argument("--source", required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--form", choices=("flat", "deep"))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(words.split())
    assert end.value.code == 2
    assert capsys.readouterr().err == f"mlbert: error: {message}\n"
