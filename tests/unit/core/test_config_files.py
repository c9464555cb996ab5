"""Reading exports of a config_*.sh and finding the nearest known name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlbert.core.config_files import check_exports, nearest, parse_config_name, read_yaml
from mlbert.core.errors import UserError


def test_exports_of_a_config_and_its_parent(tmp_path: Path) -> None:
    (tmp_path / "config_common.sh").write_text("export LR=1e-3\nexport NEXP=10\n")
    config = tmp_path / "config_a_1x1x8x2.sh"
    config.write_text(
        "# a comment\n"
        'source "$(dirname "${BASH_SOURCE[0]}")/config_common.sh"\n'
        "\n"
        "export LR=2e-3\n"
        'export WALLTIME="$((5 + NEXP * 12))"\n'
    )
    assert check_exports(config) == {"LR": "2e-3", "NEXP": "10", "WALLTIME": "$((5 + NEXP * 12))"}


def test_a_site_file_may_hold_logic(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("if true; then export CONT=x; fi\n")
    config = tmp_path / "config_a.sh"
    config.write_text(". ./env.sh\nexport LR=1\n")
    assert check_exports(config) == {"LR": "1"}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("export BATCH_SIZE=3", "nearest known one is BATCHSIZE"),
        ("LR=3", "neither export"),
        ("if [ 1 ]; then", "neither export"),
        ("export LR", "neither export"),
        ("source config_a.sh", "sources itself"),
    ],
)
def test_bad_lines_are_named_with_their_number(line: str, wanted: str, tmp_path: Path) -> None:
    config = tmp_path / "config_a.sh"
    config.write_text(f"export LR=1\n{line}\n")
    with pytest.raises(UserError, match=wanted) as caught:
        check_exports(config)
    assert "config_a.sh" in str(caught.value)
    assert "itself" in wanted or "config_a.sh:2" in str(caught.value)


def test_an_absent_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config_a\.sh: cannot be read"):
        check_exports(tmp_path / "config_a.sh")


def test_two_parents_and_the_later_wins(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("max_steps: 1\nlog_freq: 1\n")
    (tmp_path / "b.yaml").write_text("max_steps: 2\n")
    (tmp_path / "c.yaml").write_text("extends: [a.yaml, b.yaml]\nexperiment: 3\n")
    assert read_yaml(tmp_path / "c.yaml") == {
        "max_steps": (2, "b.yaml"),
        "log_freq": (1, "a.yaml"),
        "experiment": (3, "c.yaml"),
    }


def test_nearest() -> None:
    assert nearest("batch-size", ["BATCHSIZE", "MAX_STEPS"]) == "BATCHSIZE"
    assert nearest("qqq", ["BATCHSIZE", "MAX_STEPS"]) is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("config_DGXA100_1x8x56x1.sh", ("DGXA100", 1, 8, 56, 1, "", "1x8x56x1")),
        ("config_acme_x1_n8_8x4x36x2_pack_v2.sh", ("acme_x1_n8", 8, 4, 36, 2, "_pack_v2", "8x4x36x2_pack_v2")),
        ("config_common.sh", None),
        ("config_x_1x8x48.sh", None),
        ("env.sh", None),
    ],
)
def test_what_a_config_name_tells(name: str, parts: tuple | None) -> None:
    told = parse_config_name(name)
    if parts is None:
        assert told is None
    else:
        assert told is not None
        assert (*vars(told).values(), told.shape) == parts
