"""A small BERT with every number drawn at random, as our folder;
and the command line in this process.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mlbert.cli.main import main
from mlbert.config.bert_config import BertConfig
from mlbert.host import console
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.huggingface import to_huggingface
from same_weights import randomize
from user_errors import assert_error_line

# 197 is no multiple of 8: the vocabulary is padded in memory.
SHAPE = BertConfig(197, 32, 2, 4, 48, max_position_embeddings=40)


class Call:
    """Pickled as a call of any function."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple:
        return self.function, self.arguments


def fused_attention(
    state: dict[str, torch.Tensor], weight: str, bias: str
) -> dict[str, torch.Tensor]:
    """Return query, key and value as one tensor, under names that have {} for the layer."""
    fused = {}
    for layer in range(SHAPE.num_hidden_layers):
        for kind, name in (("weight", weight), ("bias", bias)):
            own = [
                f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}"
                for part in ("query", "key", "value")
            ]
            fused[name.format(layer)] = torch.cat([state[part] for part in own])
    return fused


@pytest.fixture(scope="session")
def shape() -> BertConfig:
    return SHAPE


@pytest.fixture(scope="session")
def state() -> dict[str, torch.Tensor]:
    """Our parameters by name, vocabulary unpadded; no bias is zero and no gain is one."""
    return to_huggingface(randomize(BertForPreTraining(SHAPE), 0.4))


@pytest.fixture
def own_folder(tmp_path: Path, state: dict[str, torch.Tensor]) -> Path:
    """The small BERT as a run leaves it."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    (folder / "bert_config.json").write_text(SHAPE.to_json())
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    return folder


@pytest.fixture
def mlbert(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs ``mlbert convert`` with words,
    asserts its exit status and returns its output.
    """
    monkeypatch.setattr(console, "LINE_SECONDS", 3600.0)  # no lines of progress on a busy machine

    def run(*words: object, status: int = 0) -> tuple[str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["convert", *map(str, words)])
        out, err = capfd.readouterr()
        assert end.value.code == status, err
        return out, err

    return run


@pytest.fixture
def refused(mlbert):
    """Assert that a conversion ends with exit status 2 and one error (see `assert_error_line`),
    and writes nothing.
    """

    def check(command: str, source: Path, target: Path, *words: object, **error: Any) -> None:
        before = sorted(target.parent.iterdir())
        _, stderr = mlbert(command, source, target, *words, status=2)
        assert_error_line(stderr, **error)
        assert sorted(target.parent.iterdir()) == before

    return check
