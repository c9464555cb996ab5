"""The padded MosaicBERT of tools/bench_mosaic.py is the same model as the unpadded one."""

import numpy as np
import pytest
import torch

from bench_mosaic import PaddedMosaicBert, expert_side, padded_side
from mlbert.config.bert_config import BertConfig
from mlbert.data.loading.batches import HostBatch
from mlbert.data.loading.synthetic import sequences
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.objectives import MLM_DIVISOR_EPS, MaskedLM
from mlbert.models.weights.huggingface import padded_inputs

OPTIONS = "position_embedding_type=alibi gated_mlp=true hidden_act=gelu_erf "
OPTIONS += "hidden_dropout_prob=0 attention_probs_dropout_prob=0"
SHAPE = BertConfig(90, 24, 2, 3, 40, max_position_embeddings=32).with_options(OPTIONS)  # 3 is not a power of two


@pytest.fixture
def batch() -> HostBatch:
    rows = sequences(np.array([32, 5, 17, 9]), SHAPE.vocab_size, np.random.default_rng(1))
    return HostBatch.of(rows, np.ones(4, np.int64), np.arange(4), 32)


@pytest.mark.parametrize("length", [32, 48])
def test_padded_model_has_the_same_loss_and_gradients(batch: HostBatch, length: int) -> None:
    model = BertForMaskedLM(SHAPE)
    model.initialize(3)
    padded = PaddedMosaicBert(model)
    flat = batch.to("cpu")
    divisor = torch.tensor(batch.num_masked + MLM_DIVISOR_EPS)
    loss = MaskedLM("step").loss(model, flat, None, [divisor])
    padded_loss = padded(padded_inputs(flat, length)) / batch.num_masked
    torch.testing.assert_close(loss, padded_loss, rtol=1e-6, atol=1e-6)
    loss.backward()
    padded_loss.backward()
    for name, parameter in model.named_parameters():
        expected = padded.weights[name.replace(".", "/")].grad
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=name)


def test_expert_step_has_the_same_loss(batch: HostBatch) -> None:
    model = BertForMaskedLM(SHAPE)
    model.initialize(3)
    losses = [side.step() for side in (padded_side(batch, model, 48), *(expert_side(batch, model, n) for n in (1, 3)))]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
