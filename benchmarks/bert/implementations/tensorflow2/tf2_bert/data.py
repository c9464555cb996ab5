"""What a run reads: looked at before it starts, opened after it has, cut into rows for every replica.

    inputs = inspect(config[ModelConfig], config[DataConfig], config[TensorFlowConfig])
    data = Data(config[DataConfig], config[EvaluationConfig], config[TensorFlowConfig], inputs, strategy, seed)
    data.open(first_step)
    rows = next(data.batches)

A data set is one that `mlbert.data.formats` opens, or TFRecords for tf.data (`tf2_bert.tfrecords`). From a store, a
step holds the same sequences as in the PyTorch implementation with the same seed, global batch and packing, whatever
the number of replicas: `mlbert.data.formats.order` says which.

Legend: B rows of one replica's batch, L tokens of a row, P predictions of a row, S sequences of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlbert.config.bert_config import BertConfig
from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.data.formats.base import Store, StoreInfo, named_by_files
from mlbert.data.formats.checksums import FileChecks, FileSum
from mlbert.data.formats.open import (
    check_opened,
    check_same_vocabulary,
    check_shape,
    check_vocabulary,
    describe,
    open_store,
    widths_at_most,
)
from mlbert.data.loading.config import DataConfig
from mlbert.host.errors import UserError
from mlbert.models.config import ModelConfig
from mlbert.training.config import EvaluationConfig
from tf2_bert.rows import Rows
from tf2_bert.store_data import StoreEvaluation, StoreTraining
from tf2_bert.store_rows import RowShape, row_shape, zero_rows
from tf2_bert.synthetic import SyntheticStore
from tf2_bert.tfrecords import Files, TFRecordEvaluation, TFRecordTraining, match_files

EVALUATED_ON_TRAINING = "the evaluation takes the first samples of the training files, as in MLPerf v0.7"

Source = StoreInfo | Files


@dataclass(frozen=True)
class Inputs:
    """Inputs that fit each other."""

    shape: BertConfig  # of the model
    train: Source
    evaluation: Source
    vocabulary: Path | None  # the file that `mlbert prepare` leaves beside the training set; None where there is none
    notes: tuple[str, ...]  # what the user should be told of the choice

    @property
    def train_data(self) -> str:
        """What names the training set, see `StoreInfo.known_as`, or ``synthetic``."""
        return _identity(self.train)

    @property
    def eval_data(self) -> str:
        """Likewise of the evaluation set."""
        return _identity(self.evaluation)

    @property
    def max_sequence_length(self) -> int:
        """Of the training set, tokens."""
        return self.train.max_seq_length if isinstance(self.train, StoreInfo) else self.train.shape.tokens

    def sequences_per_pack(self, max_sequences: int) -> float | None:
        """See `StoreInfo.sequences_per_pack`."""
        return self.train.sequences_per_pack(max_sequences) if isinstance(self.train, StoreInfo) else 1.0


class Data:
    """The data of a run, cut for the replicas of a strategy.

    Attributes:
        batches: endless iterator of the strategy's `Rows`, B for each replica and step; there after `open`.
        resume_note: what to tell when a run resumes; None: it takes up the exact step.

    Raises UserError: the sets are smaller than asked for, or have not the bins that BIN_COUNTS asks for.
    """

    def __init__(
        self,
        data: DataConfig,
        evaluation: EvaluationConfig,
        tensorflow: TensorFlowConfig,
        inputs: Inputs,
        strategy: Any,
        seed: int,
    ) -> None:
        self._strategy, self._rows = strategy, data.train_batch_size
        self._training = training_data(data, tensorflow, inputs, seed)
        self._evaluation = evaluation_data(data, evaluation, inputs) if tensorflow.do_eval else None
        self._checks, self._sums = FileChecks(), [*_sums(inputs.train), *_sums(inputs.evaluation)]
        self.batches: Any = None
        self.resume_note = self._training.resume_note

    @property
    def num_eval_samples(self) -> int:
        """Sequences of an evaluation; known after `open`, 0 where there is none."""
        return self._evaluation.num_examples if self._evaluation else 0

    def warm_up_rows(self) -> Rows:
        """Zeros in the form of one replica's training rows; needs no `open`."""
        return zero_rows(self._rows, self._training.shape)

    def open(self, first_step: int = 0) -> None:
        """First touch of the data; `batches` begin with optimizer step ``first_step``. Raises UserError: a file is
        missing or damaged, or a set is too small."""
        self._training.open()
        if self._evaluation:
            self._evaluation.open()
        self.batches = iter(self._training.dataset(self._strategy, first_step))
        for number, file in enumerate(self._sums):
            self._checks.add(number, file)

    def evaluation(self) -> Iterator[Any]:
        """The strategy's `Rows` of one evaluation: every sample once over all replicas, as many batches everywhere."""
        assert self._evaluation is not None, "DO_EVAL is off"
        self._checks.look()
        rows = iter(self._evaluation.dataset(self._strategy))
        for _ in range(self._evaluation.steps(self._strategy.num_replicas_in_sync)):
            yield next(rows)

    def translated(self, error: BaseException) -> Exception | None:
        """Why reading failed, where ``error``, which came out of a step or an evaluation, comes from that; else None.
        Mostly a UserError."""
        found = self._training.translated(error)
        return found or (self._evaluation.translated(error) if self._evaluation else None)

    def finish(self) -> None:
        """Waits for the checksums of listed files. Raises UserError: one is another, so that the run is no success."""
        self._checks.finish()

    def close(self) -> None:
        """Stop reading ahead."""
        self.batches = None


class TrainingData(Protocol):
    """Training rows."""

    shape: RowShape
    resume_note: str | None  # what to tell when a run resumes; None: it takes up the exact step

    def open(self) -> None:
        """First touch of the data. Raises UserError: it is missing or damaged."""

    def dataset(self, strategy: Any, first_step: int = 0) -> Any:
        """Endless tf.distribute.DistributedDataset of `Rows`, B for each replica and step, beginning with optimizer
        step ``first_step``."""

    def translated(self, error: BaseException) -> Exception | None:
        """Why reading failed, where ``error``, which TensorFlow raised in a step, comes from that; else None."""


class EvaluationData(Protocol):
    """Evaluation rows; each sequence once over all replicas."""

    shape: RowShape
    num_examples: int  # sequences; known after `open`

    def open(self) -> None:
        """First touch of the data. Raises UserError: it is missing, damaged or too small."""

    def steps(self, num_replicas: int) -> int:
        """Batches of every replica; known after `open`."""

    def dataset(self, strategy: Any) -> Any:
        """tf.distribute.DistributedDataset of `Rows`, B for each replica and step; what has no sequence, in the last
        steps, has weights 0. The same at each call; it begins anew after `steps`."""

    def translated(self, error: BaseException) -> Exception | None:
        """As `TrainingData.translated`."""


def inspect(model: ModelConfig, data: DataConfig, tensorflow: TensorFlowConfig) -> Inputs:
    """Look at the model's shape and at the data that the settings name; read no sample. Raises UserError: something is
    missing, or model, data and vocabulary do not fit each other."""
    shape = BertConfig.from_json(model.bert_config_file).with_options(model.model_options)
    if data.synthetic_data:
        made_up = _synthetic(data, shape).info
        return Inputs(shape, made_up, made_up, None, ())
    if tensorflow.input_files and data.max_sequences_per_pack > 1:
        reason = f"packs of {data.max_sequences_per_pack} sequences are not made of what tf.data reads"
        raise UserError(
            "config.conflict", "MAX_SEQUENCES_PER_PACK", reason, "Give DATADIR_PHASE2 instead of INPUT_FILES"
        )
    widths = (data.max_seq_length, data.max_predictions_per_seq)
    most = widths_at_most(*widths, shape)
    notes: tuple[str, ...] = ()
    train: Source
    if tensorflow.input_files:
        train = match_files(tensorflow.input_files, "INPUT_FILES", most)
    else:
        train = describe(data.input_dir, most)
    evaluation: Source
    if tensorflow.eval_files:
        evaluation = match_files(tensorflow.eval_files, "EVAL_FILES", most)
    elif tensorflow.input_files:
        evaluation, notes = train, (EVALUATED_ON_TRAINING,)
    else:
        evaluation = describe(data.eval_dir, most)
    vocabulary = None
    if isinstance(train, StoreInfo):
        beside = train.folder.parent / "vocab.txt"
        if beside.exists():
            check_vocabulary(train, vocabulary := beside)
        _check_widths(train, *widths)
    known = [info for source in (train, evaluation) for info in _infos(source)]
    for info in known:
        check_same_vocabulary(known[0], info)
        check_shape(info, shape, model.bert_config_file)
    for source in (train, evaluation):
        _check_positions(source, shape)
    return Inputs(shape, train, evaluation, vocabulary, notes)


def _check_widths(info: StoreInfo, max_seq_length: int | None, max_predictions: int | None) -> None:
    if max_seq_length not in (None, info.max_seq_length):
        reason = f"is {max_seq_length}, {info.folder} has sequences of up to {info.max_seq_length} tokens"
        raise UserError("config.conflict", "MAX_SEQ_LENGTH", reason, f"Set it to {info.max_seq_length} or leave it out")
    if max_predictions is not None and max_predictions < info.max_predictions:
        reason = f"is {max_predictions}, {info.folder} has up to {info.max_predictions} in a sequence"
        raise UserError(
            "config.conflict", "MAX_PREDICTIONS_PER_SEQ", reason, f"Set it to {info.max_predictions} or leave it out"
        )


def _infos(source: Source) -> tuple[StoreInfo, ...]:
    return (source,) if isinstance(source, StoreInfo) else source.listed


def _check_positions(source: Source, model: BertConfig) -> None:
    if isinstance(source, Files) and source.shape.tokens > model.max_position_embeddings:
        reason = (
            f"has sequences of {source.shape.tokens} tokens, the model has {model.max_position_embeddings} positions"
        )
        raise UserError(
            "data.too-long",
            source.patterns,
            reason,
            "Raise max_position_embeddings or take data with shorter sequences",
        )


def _sums(source: Source) -> tuple[FileSum, ...]:
    return source.sums if isinstance(source, Files) else ()  # a store checks its own


def _identity(source: Source) -> str:
    if isinstance(source, Files):
        return named_by_files(source.identity, source.content)
    return "synthetic" if source.kind == "synthetic" else source.known_as


def training_data(data: DataConfig, tensorflow: TensorFlowConfig, inputs: Inputs, seed: int) -> TrainingData:
    """Return the training set of a run; nothing of it is read before `open`. Raises UserError: it does not have the
    bins that BIN_COUNTS asks for."""
    if isinstance(inputs.train, Files):
        return TFRecordTraining(
            inputs.train,
            data.train_batch_size,
            vocab_size=inputs.shape.vocab_size,
            deterministic=tensorflow.deterministic,
            seed=seed,
        )
    return StoreTraining(
        inputs.train,
        data.train_batch_size,
        shape_of(data, inputs.train),
        seed=seed,
        vocab_size=inputs.shape.vocab_size,
        bin_counts=data.counts_of_bins,
        opened=_opener(data, inputs, inputs.train),
    )


def evaluation_data(data: DataConfig, evaluation: EvaluationConfig, inputs: Inputs) -> EvaluationData:
    """Return the evaluation set of a run; nothing of it is read before `open`. Raises UserError: it is too small."""
    source, vocab_size = inputs.evaluation, inputs.shape.vocab_size
    rows, num_examples = evaluation.eval_batch_size, evaluation.num_eval_examples
    if isinstance(source, Files):
        return TFRecordEvaluation(source, rows, num_examples, vocab_size=vocab_size)
    return StoreEvaluation(
        source,
        rows,
        shape_of(data, source),
        num_examples,
        vocab_size=vocab_size,
        opened=_opener(data, inputs, source),
    )


def shape_of(data: DataConfig, info: StoreInfo) -> RowShape:
    """Return the shape of a stored set's rows: as long as its packs if these are used, else as its longest sequence."""
    sequences = data.max_sequences_per_pack
    tokens = (info.max_pack_tokens if sequences > 1 else None) or info.max_seq_length
    predictions = max(data.max_predictions_per_seq or 0, info.max_predictions)
    return row_shape(tokens, sequences, info.max_seq_length, predictions)


def _synthetic(data: DataConfig, shape: BertConfig) -> SyntheticStore:
    return SyntheticStore(
        tokens=data.max_seq_length or shape.max_position_embeddings,
        sequences=data.max_sequences_per_pack,
        max_predictions=data.max_predictions_per_seq,
        vocab_size=shape.vocab_size,
    )


def _opener(data: DataConfig, inputs: Inputs, info: StoreInfo) -> Callable[[], Store]:
    if data.synthetic_data:
        return lambda: _synthetic(data, inputs.shape)

    def opened() -> Store:
        store = open_store(info.folder)
        check_opened(info, store.info)
        return store

    return opened
