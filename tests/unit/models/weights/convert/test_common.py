"""Writing: a full disk, a target in the way, an interrupted conversion;
each leaves nothing half-written.
"""

import json

import pytest

from file_limits import largest_file

FORMS = pytest.mark.parametrize("command", ["torch-to-hf", "torch-to-nvidia", "torch-to-composer"])


@FORMS
def test_full_disk_is_reported_and_leaves_no_file(tmp_path, own_folder, refused, command):
    with largest_file(20_000):
        refused(
            command,
            own_folder,
            tmp_path / "out",
            code="file.unwritable",
            subject=tmp_path / "out",
            wording=False,
        )


@FORMS
def test_left_overs_of_a_killed_conversion_do_not_matter(tmp_path, own_folder, mlbert, command):
    partial = tmp_path / ".out.partial"
    if command == "torch-to-hf":
        partial.mkdir()
        for name in ("model.safetensors", "stray"):
            (partial / name).write_text("half")
    else:
        partial.write_text("half")
    mlbert(command, own_folder, tmp_path / "out")
    assert not partial.exists()
    mlbert(command, own_folder, tmp_path / "again")
    if (tmp_path / "out").is_dir():
        assert not (tmp_path / "out" / "stray").exists()
    else:
        assert (tmp_path / "out").read_bytes() == (tmp_path / "again").read_bytes()


@FORMS
@pytest.mark.parametrize("lacking", ["bert_config.json", "model.safetensors"])
def test_incomplete_source(tmp_path, own_folder, refused, command, lacking):
    (own_folder / lacking).unlink()
    refused(
        command, own_folder, tmp_path / "out", code="file.unreadable", subject=own_folder / lacking
    )


def test_vocabulary_and_configuration_travel_and_must_agree(tmp_path, own_folder, mlbert, refused):
    mlbert("torch-to-hf", own_folder, tmp_path / "hf")
    assert (tmp_path / "hf" / "vocab.txt").read_text() == "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n"
    assert (
        json.loads((tmp_path / "hf" / "config.json").read_text())["hidden_act"]
        == "gelu_pytorch_tanh"
    )
    file = own_folder / "vocab.txt"
    file.write_text(file.read_text() + "".join(f"entry{number}\n" for number in range(193)))
    (own_folder / "tokenizer_config.json").unlink(missing_ok=True)
    refused("torch-to-hf", own_folder, tmp_path / "out", code="vocabulary.mismatch", subject=file)
