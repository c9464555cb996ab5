"""The exports of a config_*.sh and its name."""

import pytest

from mlbert.config.sources import Export, parse_config_name
from mlbert.recipes.sections import check_exports
from user_errors import user_error


@pytest.mark.parametrize(
    ("text", "value", "gives"),
    [
        ("5e-3", "5e-3", True),
        ("5e-3", "0.005", False),
        ("${tree_dir}/runs/$SYSTEM", "/a/b/runs/x", True),
        ("${tree_dir}/runs", "/a/b/run", False),
        ('$(dirname "${BASH_SOURCE[0]}")/x', "/a/x", True),
        ("$((5 + NEXP * 12))", "125", True),
        ("a.b", "acb", False),
    ],
)
def test_whether_an_export_gave_a_value(text, value, gives):
    assert Export(text, "x:1").gives(value) is gives


@pytest.mark.parametrize(
    ("line", "code", "subject"),
    [
        ("export BATCH_SIZE=3", "config.unknown-name", "config_a.sh:2"),
        ("LR=3", "config.file", "config_a.sh:2"),
        ("if [ 1 ]; then", "config.file", "config_a.sh:2"),
        ("export LR", "config.file", "config_a.sh:2"),
        ("source config_a.sh", "config.file", "config_a.sh"),
    ],
)
def test_bad_lines_are_named_with_their_number(line, code, subject, tmp_path):
    config = tmp_path / "config_a.sh"
    config.write_text(f"export LR=1\n{line}\n")
    with user_error(code, subject):
        check_exports(config)
    config.unlink()
    with user_error("file.unreadable", config):
        check_exports(config)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("config_DGXA100_1x8x56x1.sh", ("DGXA100", 1, 8, 56, 1, "", "1x8x56x1")),
        (
            "config_acme_x1_n8_8x4x36x2_pack_v2.sh",
            ("acme_x1_n8", 8, 4, 36, 2, "_pack_v2", "8x4x36x2_pack_v2"),
        ),
        ("config_common.sh", None),
        ("config_x_1x8x48.sh", None),
        ("env.sh", None),
    ],
)
def test_a_config_name_is_parsed(name, parts):
    found = parse_config_name(name)
    assert (found and (*vars(found).values(), found.shape)) == parts
