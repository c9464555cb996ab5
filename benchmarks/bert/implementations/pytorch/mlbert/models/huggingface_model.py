"""Run Hugging Face's BERT classes on our batches: the padded baseline for our own model.

The ``transformers`` class runs with its own kernels on the padded batch: all positions, including
padding, go through every layer and, in the masked-LM class, through the product with the full
vocabulary (not rounded up to a multiple of 8). Only then are the masked tokens' logits selected for
the objective. Parameters have the same names and meaning as ours, so weights are interchangeable.

Dropout uses PyTorch's generator: masks repeat only
if a step is split into micro-batches in the same way.

Legend: S sequences, W padded length, T tokens, M masked tokens, V vocabulary, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mlbert.config import flops
from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import Batch
from mlbert.host.errors import UserError, import_package
from mlbert.models.bert import MaskedLogits, SequenceLogits
from mlbert.models.encoder import Keys, NoDerivedState
from mlbert.models.weights.huggingface import huggingface_config, obstacle, padded_tokens
from mlbert.ops import api as ops

SETTING = "MODEL_IMPLEMENTATION=huggingface"


class HuggingFaceModel(NoDerivedState, nn.Module):
    """Base of both classes.

    Args:
        shape: of the model.
        dtype: of products and attention, by autocast; parameters are float32.
        pad_to: length to pad sequences to; the batch's longest sequence if that is longer
            or this is None.
        values: additional values of ``transformers.BertConfig``.

    Raises:
        UserError: transformers is not installed, or its BERT does not support the shape.
    """

    def __init__(
        self,
        architecture: str,
        shape: BertConfig,
        dtype: torch.dtype,
        pad_to: int | None,
        values: Mapping[str, object],
    ) -> None:
        super().__init__()
        if why_not := obstacle(shape):
            raise UserError(
                "model.unsupported", SETTING, why_not, "Set MODEL_IMPLEMENTATION=mlbert"
            )
        self.config = shape
        self.dtype = dtype
        self.architecture = architecture
        self._pad_to = pad_to
        self._values = {**huggingface_config(shape, architecture), **values}
        self._drops_out = max(shape.hidden_dropout_prob, shape.attention_probs_dropout_prob) > 0.0
        peer = self._new_peer()
        # Register its children here, so that parameter names match ours.
        # A tuple hides the peer itself from nn.Module.
        for name, part in peer.named_children():
            self.add_module(name, part)
        self._peer = (peer,)

    def _new_peer(self) -> Any:
        transformers = import_package("transformers", SETTING, "huggingface")
        values: dict[str, Any] = {
            k: v for k, v in self._values.items() if k not in ("architectures", "model_type")
        }
        peer = getattr(transformers, self.architecture)(transformers.BertConfig(**values))
        if hasattr(peer, "cls") and not self.config.tie_word_embeddings:
            # unused: the decoder has its own bias.
            peer.cls.predictions.register_parameter("bias", None)
        return peer

    def initialize(self, seed: int) -> None:
        """Initialize as the class does after ``torch.manual_seed(seed)``: normal, not truncated
        (ours is, at two deviations), zero biases and [PAD] embedding, unit LayerNorm gains.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = self._new_peer()
        self.load_state_dict(drawn.state_dict())

    def ordered_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all parameters in the model's own order, tied ones once."""
        return list(self.named_parameters())

    def dropout_keys(self, seed: int, step: int) -> Tensor:
        """Return the key of a step's masks, int32 [1, 1] on the host."""
        return ops.dropout_keys(seed, step, 1, 1)

    def training_flops(self, batch: flops.Counted) -> int:
        """Return the FLOPs that our model counts for the batch, so that utilisations are
        comparable: without padding and logits of unmasked tokens, although both are computed here.
        """
        return flops.BACKWARD_FACTOR * self._forward_flops(flops.BatchWork.of(batch))

    def capture_obstacle(self, device: torch.device, max_seqlen: int) -> str | None:
        """Return why CUDA graphs are unsupported: each replay would repeat the masks of the
        capture.
        """
        return f"{SETTING} seeds its dropout on the host"

    def refresh(self) -> None:
        """Do nothing: there is no state derived from the weights."""

    def recording(self) -> AbstractContextManager[object]:
        """Return an empty context; see `refresh`."""
        return nullcontext()

    def _forward_flops(self, work: flops.BatchWork) -> int:
        raise NotImplementedError

    def _dense_logits(self, batch: Batch, keys: Keys | None) -> tuple[Tensor, Tensor]:
        """Return the class's logits, in the compute precision,
        and the index of each token among S W, int64 [T].
        """
        (peer,) = self._peer
        drops_out = keys is not None and self._drops_out
        if self.training != drops_out:
            self.train(drops_out)
        tokens, places = padded_tokens(batch, max(self._pad_to or 0, batch.max_seqlen))
        device = batch.input_ids.device
        generators = [device] if device.type == "cuda" else []
        with (
            torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32),
            torch.random.fork_rng(generators, enabled=drops_out),
        ):
            if keys is not None and drops_out:
                # Unique per micro-batch and rank: the step's key
                # and the dropout row of the first token.
                torch.manual_seed(
                    ((int(keys[0][0]) & 0xFFFFFFFF) << 31) + int(batch.dropout_rows[0])
                )
            return peer(**tokens).logits, places


class HuggingFaceForMaskedLM(HuggingFaceModel):
    """``transformers.BertForMaskedLM`` under `mlbert.models.objectives.MaskedLM`.

    See `HuggingFaceModel`.
    """

    def __init__(
        self, shape: BertConfig, dtype: torch.dtype = torch.float32, pad_to: int | None = None
    ) -> None:
        super().__init__("BertForMaskedLM", shape, dtype, pad_to, {})

    def forward(self, batch: Batch, keys: Keys | None) -> MaskedLogits:
        """Return logits [M, V] of the masked tokens, selected from [S, W, V];
        ``keys`` None means evaluation.
        """
        logits, places = self._dense_logits(batch, keys)
        return MaskedLogits(
            logits.flatten(0, 1).index_select(0, places.index_select(0, batch.masked_positions))
        )

    def _forward_flops(self, work: flops.BatchWork) -> int:
        return flops.masked_lm(self.config, work)


class HuggingFaceForSequenceClassification(HuggingFaceModel):
    """``transformers.BertForSequenceClassification`` with ``num_labels`` outputs.

    See `HuggingFaceModel`.
    """

    def __init__(
        self,
        shape: BertConfig,
        num_labels: int,
        dtype: torch.dtype = torch.float32,
        pad_to: int | None = None,
    ) -> None:
        super().__init__(
            "BertForSequenceClassification", shape, dtype, pad_to, {"num_labels": num_labels}
        )
        self.num_labels = num_labels

    def forward(self, batch: Batch, keys: Keys | None) -> SequenceLogits:
        """Return logits [S, L] of each sequence; ``keys`` None means evaluation."""
        return SequenceLogits(self._dense_logits(batch, keys)[0])

    def _forward_flops(self, work: flops.BatchWork) -> int:
        return flops.classifier(self.config, work, self.num_labels)
