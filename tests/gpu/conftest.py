"""Shared by the tests on a GPU: all of them are marked gpu, and skipped with the reason where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.ops import api as ops

HERE = Path(__file__).parent
WHY_NOT = "no CUDA device" if torch.version.cuda else "this PyTorch is built without CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU."""
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def fast_ops(device: torch.device) -> Iterator[None]:
    """Every test starts from the best ops of the device."""
    ops.select("auto", device)
    yield
    ops.select("auto", device)
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def large() -> BertConfig:
    """BERT-large's shape with two layers."""
    return BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096
    )
