"""Fixtures for the GPU tests, which are marked gpu and skipped without a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.ops import api as ops

HERE = Path(__file__).parent
SKIP_REASON = "no CUDA device" if torch.version.cuda else "this PyTorch is built without CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in this folder."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason=SKIP_REASON))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the GPU."""
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def fast_ops(device: torch.device) -> Iterator[None]:
    """Start every test with the best ops of the device."""
    ops.select("auto", device)
    yield
    ops.select("auto", device)
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def large() -> BertConfig:
    """Return BERT-large's shape with two layers."""
    return BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096
    )
