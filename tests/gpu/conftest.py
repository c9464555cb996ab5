"""Fixtures for the GPU tests, which are marked gpu and skipped without a CUDA device."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mlbert.config.bert_config import BertConfig
from mlbert.ops import api as ops
from mlbert.ops.fp8_scaling import Products
from mlbert.ops.precision import FP8_CAPABILITY

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
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def fast_ops(device: torch.device) -> Iterator[None]:
    """Start every test with the best ops of the device."""
    ops.select("auto", device)
    yield
    ops.select("auto", device)
    torch.cuda.empty_cache()


@pytest.fixture
def allow_sync_afterwards() -> Iterator[None]:
    """Allow synchronization again after the test."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def fp8_gpu(device: torch.device) -> None:
    """Skip the test if the GPU has no FP8 products."""
    if torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        pytest.skip("this GPU has no FP8 products")


@pytest.fixture(params=[None, Products()], ids=["bf16", "fp8"])
def products(request: pytest.FixtureRequest) -> Products | None:
    """Return which products are in FP8, or None; skip the test if the GPU has none."""
    if request.param:
        request.getfixturevalue("fp8_gpu")
    return request.param


@pytest.fixture(scope="session")
def large() -> BertConfig:
    """Return BERT-large's shape with two layers."""
    return BertConfig(30522, 1024, 2, 16, 4096)
