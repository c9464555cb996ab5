"""Writing: a full disk, a target in the way, an interrupted conversion; each leaves nothing half-written."""

from __future__ import annotations

import json
import resource
import signal

import pytest

FORMS = pytest.mark.parametrize("command", ["torch-to-hf", "torch-to-nvidia", "torch-to-composer"])


@pytest.fixture
def full_disk():
    """Files of this process may not grow beyond 20,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@FORMS
def test_full_disk_is_reported_and_leaves_no_file(tmp_path, own_folder, full_disk, refused, command):
    out = tmp_path / "out"
    refused(command, own_folder, out, target=out, code="file.unwritable", subject=out, wording=False)


@FORMS
def test_left_overs_of_a_killed_conversion_do_not_matter(tmp_path, own_folder, mlbert, command):
    if command == "torch-to-hf":
        (tmp_path / ".out.partial").mkdir()
        (tmp_path / ".out.partial" / "model.safetensors").write_text("half")
        (tmp_path / ".out.partial" / "stray").write_text("half")
    else:
        (tmp_path / ".out.partial").write_text("half")
    assert mlbert(command, own_folder, tmp_path / "out")[0] == 0
    assert not (tmp_path / ".out.partial").exists()
    assert mlbert(command, own_folder, tmp_path / "again")[0] == 0
    if (tmp_path / "out").is_dir():
        assert not (tmp_path / "out" / "stray").exists()
    else:
        assert (tmp_path / "out").read_bytes() == (tmp_path / "again").read_bytes()


@FORMS
@pytest.mark.parametrize("lacking", ["bert_config.json", "model.safetensors"])
def test_incomplete_source(tmp_path, own_folder, refused, command, lacking):
    (own_folder / lacking).unlink()
    out = tmp_path / "out"
    refused(command, own_folder, out, target=out, code="file.unreadable", subject=own_folder / lacking)


def test_vocabulary_and_configuration_travel(tmp_path, own_folder, mlbert):
    assert mlbert("torch-to-hf", own_folder, tmp_path / "hf")[0] == 0
    assert (tmp_path / "hf" / "vocab.txt").read_text() == "[PAD]\n[UNK]\n"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["hidden_act"] == "gelu_pytorch_tanh"


def test_a_vocabulary_that_was_cut_is_refused(tmp_path, own_folder, refused):
    (own_folder / "vocab.txt").write_text("".join(f"entry{number}\n" for number in range(198)))
    out = tmp_path / "out"
    refused("torch-to-hf", own_folder, out, target=out, code="vocabulary.mismatch", subject=own_folder / "vocab.txt")
