"""Hugging Face's BERT classes on our batches: the padded baseline that our own model is compared with.

What runs is the class of ``transformers`` itself with its own kernels, on the batch in its padded form: all positions
of all sequences, padding included, go through every layer and, of the masked-LM class, through the product with the
whole vocabulary of its true size (nothing is rounded up to a multiple of 8). Only then are the masked tokens' logits
picked out for the objective. Its parameters have the names and the meaning of ours, so weights go either way.

Dropout draws from PyTorch's generator: two runs of the same split of a step draw the same, another split does not.

Legend: S sequences, W padded length, T tokens, M masked tokens, V vocabulary, L labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mlbert.config.bert_config import BertConfig
from mlbert.data.loading.batches import Batch
from mlbert.host.errors import UserError
from mlbert.models import flops
from mlbert.models.bert import MaskedLogits, SequenceLogits
from mlbert.models.encoder import Keys
from mlbert.models.weights.huggingface import huggingface_config, obstacle, padded_tokens
from mlbert.ops import api as ops

SETTING = "MODEL_IMPLEMENTATION=huggingface"


class HuggingFaceModel(nn.Module):
    """What both classes have in common.

    Args:
        shape: of the model.
        dtype: of products and attention, by autocast; parameters are float32.
        pad_to: sequences are padded to so many tokens, or to the longest of the batch where that is longer.
        values: further values of ``transformers.BertConfig``.

    Raises:
        UserError: transformers is not installed, or its BERT has no such shape.
    """

    is_calibrated = True

    def __init__(
        self, architecture: str, shape: BertConfig, dtype: torch.dtype, pad_to: int | None, values: Mapping[str, object]
    ) -> None:
        super().__init__()
        if why_not := obstacle(shape):
            raise UserError("model.unsupported", SETTING, why_not, "Set MODEL_IMPLEMENTATION=mlbert")
        self.config, self.dtype, self.architecture, self._pad_to = shape, dtype, architecture, pad_to
        self._values = {**huggingface_config(shape, architecture), **values}
        self._drops_out = max(shape.hidden_dropout_prob, shape.attention_probs_dropout_prob) > 0.0
        peer = self._new_peer()
        # Its parts are ours, so that its parameters keep their names; itself is kept beside them.
        for name, part in peer.named_children():
            self.add_module(name, part)
        self._peer = (peer,)

    def _new_peer(self) -> Any:
        try:
            import transformers
        except ImportError:
            raise UserError(
                "package.missing", SETTING, "transformers is not installed", "pip install 'mlbert[huggingface]'"
            ) from None
        values: dict[str, Any] = {k: v for k, v in self._values.items() if k not in ("architectures", "model_type")}
        peer = getattr(transformers, self.architecture)(transformers.BertConfig(**values))
        if hasattr(peer, "cls") and not self.config.tie_word_embeddings:
            peer.cls.predictions.register_parameter("bias", None)  # the decoder has one of its own; nobody reads this
        return peer

    def initialize(self, seed: int) -> None:
        """The weights that the class draws after ``torch.manual_seed(seed)``: normal, not cut off (ours are cut at two
        deviations), zero biases and embedding of [PAD], unit LayerNorm gains."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = self._new_peer()
        self.load_state_dict(drawn.state_dict())

    def ordered_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """All parameters in the model's own order, a tied one once."""
        return list(self.named_parameters())

    def dropout_keys(self, seed: int, step: int) -> Tensor:
        """int32 [1, 1] on the host: names a step's masks."""
        return ops.dropout_keys(seed, step, 1, 1)

    def training_flops(self, batch: flops.Counted) -> int:
        """What our model counts for the batch, so that utilisations compare: neither padding nor the logits of
        unmasked tokens, though both are computed here."""
        return flops.BACKWARD_FACTOR * self._forward_flops(flops.BatchWork.of(batch))

    def capture_obstacle(self, device: torch.device, max_seqlen: int) -> str | None:
        """Never None: the masks of a replay would be those of the capture."""
        return f"{SETTING} seeds its dropout on the host"

    def weights_changed(self) -> None:
        """Nothing is derived from the weights."""

    def refresh(self) -> None:
        """As `weights_changed`."""

    def end_step(self, over_ranks_max: Callable[[Tensor], Any]) -> None:
        """As `weights_changed`."""

    def forget_step(self) -> None:
        """As `weights_changed`."""

    def recording(self) -> AbstractContextManager[object]:
        """As `weights_changed`."""
        return nullcontext()

    def derived_state(self) -> dict[str, Tensor]:
        """As `weights_changed`."""
        return {}

    def load_derived_state(self, state: Mapping[str, Tensor]) -> None:
        """As `weights_changed`."""

    def _forward_flops(self, work: flops.BatchWork) -> int:
        raise NotImplementedError

    def _dense_logits(self, batch: Batch, keys: Keys | None) -> tuple[Tensor, Tensor]:
        """Logits of the class, in the compute precision, and the places int64 [T] of the tokens among S W."""
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
                # The step and the first token's name in it, which no other micro-batch or rank has.
                torch.manual_seed(((int(keys[0][0]) & 0xFFFFFFFF) << 31) + int(batch.dropout_rows[0]))
            return peer(**tokens).logits, places


class HuggingFaceForMaskedLM(HuggingFaceModel):
    """``transformers.BertForMaskedLM`` under `mlbert.models.objectives.MaskedLM`. See `HuggingFaceModel`."""

    def __init__(self, shape: BertConfig, dtype: torch.dtype = torch.float32, pad_to: int | None = None) -> None:
        super().__init__("BertForMaskedLM", shape, dtype, pad_to, {})

    def forward(self, batch: Batch, keys: Keys | None) -> MaskedLogits:
        """Logits [M, V] of the masked tokens, out of all [S, W, V]; ``keys`` None means evaluation."""
        logits, places = self._dense_logits(batch, keys)
        return MaskedLogits(logits.flatten(0, 1).index_select(0, places.index_select(0, batch.masked_positions)))

    def _forward_flops(self, work: flops.BatchWork) -> int:
        return flops.masked_lm(self.config, work)


class HuggingFaceForSequenceClassification(HuggingFaceModel):
    """``transformers.BertForSequenceClassification`` of ``num_labels`` outputs. See `HuggingFaceModel`."""

    def __init__(
        self, shape: BertConfig, num_labels: int, dtype: torch.dtype = torch.float32, pad_to: int | None = None
    ) -> None:
        super().__init__("BertForSequenceClassification", shape, dtype, pad_to, {"num_labels": num_labels})
        self.num_labels = num_labels

    def forward(self, batch: Batch, keys: Keys | None) -> SequenceLogits:
        """Logits [S, L] of each sequence; ``keys`` None means evaluation."""
        return SequenceLogits(self._dense_logits(batch, keys)[0])

    def _forward_flops(self, work: flops.BatchWork) -> int:
        return flops.classifier(self.config, work, self.num_labels)
