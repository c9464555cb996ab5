"""A small BERT with every number drawn at random, as our folder; and the command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mlbert.cli.main import main
from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.programs import console
from user_errors import assert_error_line

# 197 is no multiple of 8: the vocabulary is padded in memory.
SHAPE = BertConfig(197, 32, 2, 4, 48, max_position_embeddings=40)


@pytest.fixture(scope="session")
def shape() -> BertConfig:
    return SHAPE


@pytest.fixture(scope="session")
def state() -> dict[str, torch.Tensor]:
    """Our parameters by name, vocabulary unpadded; no bias is zero and no gain is one."""
    generator = torch.Generator().manual_seed(3)
    model = BertForPreTraining(SHAPE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return to_huggingface(model)


@pytest.fixture
def own_folder(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    """The small BERT as a run leaves it."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "bert_config.json").write_text(SHAPE.to_json())
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    return folder


@pytest.fixture
def mlbert(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs ``mlbert convert`` with these words; returns exit code, stdout and stderr."""
    monkeypatch.setattr(console, "LINE_SECONDS", 3600.0)  # no lines of progress on a busy machine

    def run(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["convert", *map(str, words)])
        out, err = capfd.readouterr()
        return end.value.code, out, err

    return run


@pytest.fixture
def refused(mlbert, tmp_path: Path):
    """Assert that a conversion ends with one error and exit status 2, and leaves nothing behind."""

    def check(*words: object, target: Path, code: str, subject: str | Path, wording: bool = True) -> None:
        before = sorted(target.parent.iterdir())
        status, _, stderr = mlbert(*words)
        assert status == 2, stderr
        assert_error_line(stderr, code, subject, wording=wording)
        assert sorted(target.parent.iterdir()) == before

    return check
