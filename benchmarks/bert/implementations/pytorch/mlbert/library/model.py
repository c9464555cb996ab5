"""A model as an `nn.Module` whose input is padded or not, for training loops of your own.

    model = mlbert.load_model("my-model/model")
    model(batch).loss.backward()                          # a batch of mlbert.open_dataset
    model(input_ids, attention_mask).logits               # padded, as in transformers
    model(input_ids, cu_seqlens=cu_seqlens).logits        # one stream of tokens

Padding is removed before the first layer in any case, so it costs nothing.

Legend: S sequences, W padded length, T tokens, M masked tokens, D hidden, V vocabulary, L labels.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlbert.config.bert_config import BertConfig
from mlbert.data.batches import IGNORED_LABEL, Batch
from mlbert.data.formats.tokenizer_files import find_vocabulary
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json
from mlbert.models.bert import (
    BertBase,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    MaskedLogits,
    PreTrainingLogits,
    SequenceLogits,
    TokenLogits,
)
from mlbert.models.encoder import Keys
from mlbert.models.weights import weight_files
from mlbert.models.weights.export import write_huggingface
from mlbert.models.weights.huggingface import to_huggingface
from mlbert.models.weights.load import read_file
from mlbert.ops import api as ops
from mlbert.runs.starting_weights import weights_file

Head = Literal["masked-lm", "pre-training", "classification", "token-classification"]
_CLASSIFIERS = ("classification", "token-classification")
_HEADS_OF_ARCHITECTURES: Mapping[str, Head] = {
    "BertForMaskedLM": "masked-lm",
    "BertForPreTraining": "pre-training",
    "BertForSequenceClassification": "classification",
}
_CONFIG = "config.json"
_LARGEST_SEED = 2**31


class EncoderOutput(NamedTuple):
    """What a model computes from a batch.

    Attributes:
        loss: float32 scalar, the mean over the labels; None without labels.
        logits: of classes [S, L]; of a class for each token [S, W, L] or [T, L]; of the vocabulary
            [S, W, V] or [T, V], or with labels [M, V] of the labeled tokens. None if there is a
            vocabulary's loss to differentiate, whose backward pass reuses their memory.
        next_sentence_logits: [S, 2] of a pre-training model, else None.
    """

    loss: Tensor | None
    logits: Tensor | None
    next_sentence_logits: Tensor | None = None


class EncoderModel(nn.Module):
    """An encoder with a head; `mlbert.load_model` and `mlbert.new_model` make it.

    Parameters are float32. In training, dropout follows PyTorch's generator of the CPU
    (`torch.manual_seed`).

    Attributes:
        core: the model on a flat stream of tokens, with Hugging Face's parameter names.
        config: its shape.
        missing: parameters that the weights lack, which are initialized at random.
    """

    def __init__(
        self,
        core: BertBase,
        missing: Sequence[str] = (),
        tokenizer: Path | None = None,
        classes: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.core = core
        self.config = core.config
        self.missing = list(missing)
        self._tokenizer = tokenizer
        self._classes = list(classes)

    def forward(
        self,
        input_ids: Batch | Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> EncoderOutput:
        """Return the logits and, if there are labels, the loss.

        Args:
            input_ids: a batch of `mlbert.open_dataset`, on the model's device; or int64 [S, W], or
                with ``cu_seqlens`` int64 [T].
            attention_mask: [S, W], 0 at padding, which follows the tokens; None: no padding.
            token_type_ids: as ``input_ids``, 0 or 1, the sentence of each token; None: 0.
            labels: token ids or classes as ``input_ids``, -100 for tokens to leave out; of a
                classifier, classes int64 [S], numbers float [S] if it has one output, or float 0
                or 1 for each class [S, L].
            next_sentence_label: int64 [S], of a pre-training model.
            cu_seqlens: int32 [S+1]: sequence s has the tokens from cu_seqlens[s] up to
                cu_seqlens[s+1].

        Raises:
            UserError: the attention mask has tokens after padding, a sequence is longer than the
                model allows, or labels have another shape.
        """
        if isinstance(input_ids, Batch):
            return self._of_batch(input_ids)
        flat = self._flat(input_ids, attention_mask, token_type_ids, cu_seqlens)
        if isinstance(self.core, BertForSequenceClassification):
            logits = self._logits(flat.batch)
            loss = None if labels is None else classification_loss(logits, labels)
            return EncoderOutput(loss, logits)
        chosen = None
        if labels is not None:
            if labels.shape != input_ids.shape:
                reason = f"have the shape {[*labels.shape]}, the tokens {[*input_ids.shape]}"
                raise UserError("config.value", "labels", reason, "Give a label for each token")
            chosen = labels.flatten()[flat.places]
        if isinstance(self.core, BertForTokenClassification):
            of_tokens = self._logits(flat.batch)
            loss = None if chosen is None else _token_loss(of_tokens, chosen)
            return EncoderOutput(loss, flat.restored(of_tokens))
        batch = flat.batch
        if chosen is None:
            output = self._vocabulary_output(batch, None, None)
            assert output.logits is not None
            return output._replace(logits=flat.restored(output.logits))
        positions = (chosen != IGNORED_LABEL).nonzero().flatten()
        batch = _with_masked(batch, positions)
        return self._vocabulary_output(batch, chosen[positions], next_sentence_label)

    def encode(
        self,
        input_ids: Batch | Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states, [S, W, D] with zeros at padding, or [T, D].

        For arguments and errors see `forward`.
        """
        if isinstance(input_ids, Batch):
            return self.core.bert(input_ids, self._keys(), None)
        flat = self._flat(input_ids, attention_mask, token_type_ids, cu_seqlens)
        return flat.restored(self.core.bert(flat.batch, self._keys(), None))

    def save_pretrained(self, folder: str | Path) -> None:
        """Write or replace a folder for transformers, with the tokenizer that was loaded.

        Raises UserError if it cannot be written, or the shape cannot be expressed there.
        """
        write_huggingface(
            Path(folder),
            to_huggingface(self.core),
            self.config,
            self.core.architecture,
            {},
            self._tokenizer,
            self._classes,
        )

    def _keys(self) -> Keys | None:
        """Return the keys of new dropout masks; None in evaluation."""
        if not self.training:
            return None
        seed = int(torch.randint(_LARGEST_SEED, ()))
        keys: Keys = self.core.dropout_keys(seed, 0).tolist()
        return keys

    def _logits(self, batch: Batch) -> Tensor:
        """Return a classifier's logits."""
        found: SequenceLogits | TokenLogits = self.core(batch, self._keys())
        return found.labels

    def _of_batch(self, batch: Batch) -> EncoderOutput:
        core = self.core
        if isinstance(core, BertForSequenceClassification):
            logits = self._logits(batch)
            labels = batch.labels
            if labels is None:
                return EncoderOutput(None, logits)
            classes = labels if logits.shape[1] == 1 else labels.long()
            return EncoderOutput(classification_loss(logits, classes), logits)
        if isinstance(core, BertForTokenClassification):
            of_tokens = self._logits(batch)
            return EncoderOutput(_token_loss(of_tokens, batch.masked_labels), of_tokens)
        return self._vocabulary_output(batch, batch.masked_labels, batch.next_sentence_labels)

    def _vocabulary_output(
        self, batch: Batch, labels: Tensor | None, next_sentence_label: Tensor | None
    ) -> EncoderOutput:
        found: MaskedLogits | PreTrainingLogits = self.core(batch, self._keys())
        words = self.config.vocab_size
        next_sentence = found.next_sentence if isinstance(found, PreTrainingLogits) else None
        if labels is None:
            return EncoderOutput(None, found.masked[:, :words], next_sentence)
        loss_sum, _ = ops.masked_cross_entropy(found.masked, labels, words)
        loss = loss_sum / (labels != IGNORED_LABEL).sum().clamp(min=1)
        if next_sentence is not None and next_sentence_label is not None:
            loss = loss + F.cross_entropy(next_sentence.float(), next_sentence_label)
        logits = None if loss.requires_grad else found.masked[:, :words]
        return EncoderOutput(loss, logits, next_sentence)

    def _flat(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> _Flat:
        """Return the stream of tokens."""
        if cu_seqlens is not None:
            places = torch.arange(input_ids.numel(), device=input_ids.device)
            ends = cu_seqlens
        else:
            is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            is_token = is_token.bool()
            if bool((is_token[:, 1:] & ~is_token[:, :-1]).any()):
                remedy = "Put the padding after the tokens (padding_side='right')"
                raise UserError("config.value", "attention_mask", "has ones after zeros", remedy)
            places = is_token.flatten().nonzero().flatten()
            ends = F.pad(is_token.sum(1).cumsum(0), (1, 0))
        lengths = ends.diff()
        longest = int(lengths.max())
        if longest > self.config.max_position_embeddings:
            reason = (
                f"has {longest} tokens, but the model allows {self.config.max_position_embeddings}"
            )
            raise UserError("data.too-long", "input_ids", reason, "Give shorter sequences")
        ids = input_ids.flatten()[places]
        segments = torch.zeros_like(ids)
        if token_type_ids is not None:
            segments = token_type_ids.flatten()[places]
        tokens = torch.arange(ids.numel(), device=ids.device)
        batch = Batch(
            input_ids=ids,
            segment_ids=segments,
            position_ids=tokens - ends[:-1].long().repeat_interleave(lengths),
            cu_seqlens=ends.int(),
            max_seqlen=longest,
            masked_positions=tokens,
            masked_labels=torch.full_like(ids, IGNORED_LABEL),
            next_sentence_labels=torch.zeros_like(lengths, dtype=torch.int64),
            dropout_rows=places.int(),
        )
        return _Flat(batch, places, input_ids.shape)


class _Flat(NamedTuple):
    """Tokens without padding."""

    batch: Batch
    places: Tensor  # int64 [T], index of each token in the flattened input
    shape: torch.Size  # of the input

    def restored(self, rows: Tensor) -> Tensor:
        """Return rows [T, n] in the form of the input, [..., n], zeros at padding."""
        if len(self.shape) == 1:
            return rows
        whole = rows.new_zeros(self.shape.numel(), rows.shape[1])
        return whole.index_copy(0, self.places, rows).unflatten(0, self.shape)


def _with_masked(batch: Batch, positions: Tensor) -> Batch:
    """Return the batch with these tokens to predict."""
    parts: dict[str, Any] = batch.tensors() | {
        "masked_positions": positions,
        "masked_labels": batch.masked_labels[positions],
    }
    return Batch(**parts, max_seqlen=batch.max_seqlen)


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of logits [S, L] as in transformers: squared error for one output,
    binary cross-entropy for float labels [S, L], else cross-entropy of classes [S].
    """
    logits = logits.float()
    if logits.shape[1] == 1:
        return F.mse_loss(logits.flatten(), labels.flatten().float())
    if labels.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, labels.float())
    return F.cross_entropy(logits, labels.flatten())


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL)


def load_model(
    source: str | Path,
    head: Head | None = None,
    num_labels: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> EncoderModel:
    """Load a model of a run of `mlbert`, of transformers (BERT, ModernBERT, RoBERTa), of Composer
    or of NVIDIA.

    Args:
        source: what INIT_CHECKPOINT accepts: a folder or file, or its address.
        head: "masked-lm", "pre-training" (with next-sentence head), "classification" or
            "token-classification" (default: the one that the weights have, else "masked-lm").
        num_labels: outputs of a classifier, 1 for numbers (default: as many as the weights have).
        dtype: of products and activations. Parameters are float32.
        seed: of parameters that the weights lack, which are named in a warning.

    Raises:
        UserError: there are no weights, they are damaged, or of a model that is not supported.
    """
    file = weights_file(str(source))
    if not file.is_file():
        remedy = "Give the folder of a model: config.json, model.safetensors"
        raise UserError("checkpoint.missing", source, "has no weights", remedy)
    weights = read_file(file)
    if weights.shape is None:
        reason = "has no model configuration next to it"
        raise UserError("checkpoint.incomplete", file, reason, "Put its config.json there")
    chosen = head or _head_of(weights.tensors, file.parent)
    architecture = weight_files.architecture_of(weights.tensors)
    if chosen in _CLASSIFIERS and num_labels is None:
        if architecture != "BertForSequenceClassification":
            reason = "have no classifier"
            raise UserError("config.missing", "num_labels", reason, "Give the number of labels")
        num_labels = weight_files.num_labels(weights.tensors)
    core = _new_core(weights.shape, chosen, num_labels, dtype, seed)
    report = weight_files.load_state(core, weights.tensors, str(file))
    missing = sorted(report.missing)
    if missing:
        warnings.warn(f"{source} has no {', '.join(missing)}: initialized at random", stacklevel=2)
    vocabulary = find_vocabulary(file.parent)
    classes = _class_names(file.parent)
    return EncoderModel(
        core,
        missing,
        vocabulary if vocabulary.is_file() else None,
        classes if len(classes) == num_labels else (),
    )


def new_model(
    shape: str | Path | Mapping[str, Any],
    head: Head = "masked-lm",
    num_labels: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> EncoderModel:
    """Return a model with random weights.

    Args:
        shape: the file of a shape (``bert_config.json``, or one of ``configs/``), or its values.
        head, num_labels, dtype: see `load_model`.
        seed: of the weights.

    Raises:
        UserError: the shape is not valid.
    """
    if isinstance(shape, str | Path):
        config = BertConfig.from_json(Path(shape))
    else:
        config = BertConfig(**shape)
    return EncoderModel(_new_core(config, head, num_labels, dtype, seed))


def _new_core(
    shape: BertConfig, head: Head, num_labels: int | None, dtype: torch.dtype, seed: int
) -> BertBase:
    if head not in get_args(Head):
        remedy = "Use a valid one"
        raise UserError("config.choice", f"head {head!r}", "is not known", remedy, get_args(Head))
    core: BertBase
    if head in _CLASSIFIERS:
        if num_labels is None:
            remedy = "Give the number of labels"
            raise UserError("config.missing", "num_labels", "is not given", remedy)
        kind = (
            BertForSequenceClassification
            if head == "classification"
            else BertForTokenClassification
        )
        core = kind(shape, num_labels, dtype)
    else:
        core = (BertForPreTraining if head == "pre-training" else BertForMaskedLM)(shape, dtype)
    core.initialize(seed)
    return core


def _head_of(tensors: Mapping[str, Tensor], folder: Path) -> Head:
    """Return the head that weights have."""
    head = _HEADS_OF_ARCHITECTURES[weight_files.architecture_of(tensors)]
    if head != "classification":
        return head
    names = _config_values(folder).get("architectures")
    is_of_tokens = isinstance(names, list) and any("ForToken" in str(name) for name in names)
    return "token-classification" if is_of_tokens else head


def _class_names(folder: Path) -> list[str]:
    """Return the names of a classifier's outputs in a folder for transformers."""
    names = _config_values(folder).get("id2label")
    if not isinstance(names, dict):
        return []
    return [str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0]))]


def _config_values(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    return cast(dict[str, Any], read_json(file, "Restore it")) if file.is_file() else {}
