"""A run's data: inspect it before the run starts, open it afterwards,
and read rows for every replica.

    inputs = inspect(config[ModelConfig], config[DataConfig], config[TensorFlowConfig])
    data = Data(
        config[DataConfig],
        config[EvaluationConfig],
        config[TensorFlowConfig],
        inputs,
        strategy,
        seed,
    )
    data.open(first_step)
    rows = next(data.batches)

A data set is either a store that `mlbert.data.formats` opens or TFRecords for tf.data
(`tf2_bert.tfrecords`). A step from a store holds the same sequences as in the PyTorch
implementation with the same seed, global batch and packing, for any number of replicas;
`mlbert.data.formats.order` defines them.

Legend: B rows per replica's batch, L tokens per row, P predictions per row, S sequences per row.
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

EVALUATED_ON_TRAINING = "evaluation uses the first samples of the training files, as in MLPerf v0.7"

Source = StoreInfo | Files


@dataclass(frozen=True)
class Inputs:
    """Model shape and data sets that are checked to match each other."""

    shape: BertConfig  # of the model
    train: Source
    evaluation: Source
    vocabulary: Path | None  # written by `mlbert prepare` next to the training set, if it exists
    notes: tuple[str, ...]  # to print for the user

    @property
    def train_data(self) -> str:
        """Identity of the training set, see `StoreInfo.known_as`, or ``synthetic``."""
        return _identity(self.train)

    @property
    def eval_data(self) -> str:
        """Identity of the evaluation set, like `train_data`."""
        return _identity(self.evaluation)

    @property
    def max_sequence_length(self) -> int:
        """Maximum tokens per sequence of the training set."""
        return (
            self.train.max_seq_length
            if isinstance(self.train, StoreInfo)
            else self.train.shape.tokens
        )

    def sequences_per_pack(self, max_sequences: int) -> float | None:
        """See `StoreInfo.sequences_per_pack`."""
        return (
            self.train.sequences_per_pack(max_sequences)
            if isinstance(self.train, StoreInfo)
            else 1.0
        )


class Data:
    """The data of a run, distributed over the replicas of a strategy.

    Attributes:
        batches: endless iterator of the strategy's `Rows`, B for each replica and step;
            set by `open`.
        resume_note: note to print when a run resumes, or None if it resumes at the exact step.

    Raises UserError: the sets are too small, or do not have the bins of BIN_COUNTS.
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
        self._strategy = strategy
        self._rows = data.train_batch_size
        self._training = training_data(data, tensorflow, inputs, seed)
        self._evaluation = evaluation_data(data, evaluation, inputs) if tensorflow.do_eval else None
        self._checks = FileChecks()
        self._sums = [*_sums(inputs.train), *_sums(inputs.evaluation)]
        self.batches: Any = None
        self.resume_note = self._training.resume_note

    @property
    def num_eval_samples(self) -> int:
        """Sequences per evaluation, known after `open`; 0 without evaluation."""
        return self._evaluation.num_examples if self._evaluation else 0

    def warm_up_rows(self) -> Rows:
        """Return dummy rows in the shape of one replica's training rows; does not need `open`."""
        return zero_rows(self._rows, self._training.shape)

    def open(self, first_step: int = 0) -> None:
        """Open the data sets and start `batches` at optimizer step ``first_step``.

        Raises UserError: a file is missing or damaged, or a set is too small.
        """
        self._training.open()
        if self._evaluation:
            self._evaluation.open()
        self.batches = iter(self._training.dataset(self._strategy, first_step))
        for number, file in enumerate(self._sums):
            self._checks.add(number, file)

    def evaluation(self) -> Iterator[Any]:
        """Yield the strategy's `Rows` of one evaluation:
        each sample once, equally many batches per replica.
        """
        assert self._evaluation is not None, "DO_EVAL is off"
        self._checks.look()
        rows = iter(self._evaluation.dataset(self._strategy))
        for _ in range(self._evaluation.steps(self._strategy.num_replicas_in_sync)):
            yield next(rows)

    def translate_error(self, error: BaseException) -> Exception | None:
        """Return why reading failed, usually a UserError,
        or None if reading did not cause ``error``.

        ``error`` was raised by a step or an evaluation.
        """
        found = self._training.translate_error(error)
        return found or (self._evaluation.translate_error(error) if self._evaluation else None)

    def finish(self) -> None:
        """Wait for the checksums of listed files.

        Raises UserError on a mismatch, so that the run does not succeed.
        """
        self._checks.finish()

    def close(self) -> None:
        """Stop reading ahead."""
        self.batches = None


class TrainingData(Protocol):
    """Source of training rows."""

    shape: RowShape
    resume_note: str | None  # to print when a run resumes; None if it resumes at the exact step

    def open(self) -> None:
        """Open the data. Raises UserError if it is missing or damaged."""

    def dataset(self, strategy: Any, first_step: int = 0) -> Any:
        """Return an endless tf.distribute.DistributedDataset of `Rows`,
        B for each replica and step.

        It starts at optimizer step ``first_step``.
        """

    def translate_error(self, error: BaseException) -> Exception | None:
        """Return why reading failed, or None if reading did not cause ``error``,
        which TensorFlow raised in a step.
        """


class EvaluationData(Protocol):
    """Source of evaluation rows, each sequence once over all replicas."""

    shape: RowShape
    num_examples: int  # sequences; known after `open`

    def open(self) -> None:
        """Open the data. Raises UserError if it is missing, damaged or too small."""

    def steps(self, num_replicas: int) -> int:
        """Return the batches per replica; call `open` first."""

    def dataset(self, strategy: Any) -> Any:
        """Return a tf.distribute.DistributedDataset of `Rows`, B for each replica and step;
        each call returns the same.

        Empty slots in the last steps have weight 0. It restarts after `steps`.
        """

    def translate_error(self, error: BaseException) -> Exception | None:
        """See `TrainingData.translate_error`."""


def inspect(model: ModelConfig, data: DataConfig, tensorflow: TensorFlowConfig) -> Inputs:
    """Check the model's shape and the configured data without reading samples.

    Raises UserError: something is missing, or model, data and vocabulary do not match.
    """
    shape = BertConfig.from_json(model.bert_config_file).with_options(model.model_options)
    if data.synthetic_data:
        dummy = _synthetic(data, shape).info
        return Inputs(shape, dummy, dummy, None, ())
    if tensorflow.input_files and data.max_sequences_per_pack > 1:
        reason = (
            f"is {data.max_sequences_per_pack}, but sequences "
            "that tf.data reads from INPUT_FILES cannot be packed"
        )
        remedy = "Give DATADIR_PHASE2 instead of INPUT_FILES"
        raise UserError("config.conflict", "MAX_SEQUENCES_PER_PACK", reason, remedy)
    most = widths_at_most(data.max_seq_length, data.max_predictions_per_seq, shape)
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
        evaluation = train
        notes = (EVALUATED_ON_TRAINING,)
    else:
        evaluation = describe(data.eval_dir, most)
    vocabulary = None
    if isinstance(train, StoreInfo):
        vocabulary_file = train.folder.parent / "vocab.txt"
        if vocabulary_file.exists():
            vocabulary = vocabulary_file
            check_vocabulary(train, vocabulary)
        _check_widths(train, data.max_seq_length, data.max_predictions_per_seq)
    known = [info for source in (train, evaluation) for info in _infos(source)]
    for info in known:
        check_same_vocabulary(known[0], info)
        check_shape(info, shape, model.bert_config_file)
    for source in (train, evaluation):
        _check_positions(source, shape)
    return Inputs(shape, train, evaluation, vocabulary, notes)


def _check_widths(info: StoreInfo, max_seq_length: int | None, max_predictions: int | None) -> None:
    if max_seq_length not in (None, info.max_seq_length):
        reason = (
            f"is {max_seq_length}, but {info.folder} has sequences "
            f"of up to {info.max_seq_length} tokens"
        )
        raise UserError(
            "config.conflict",
            "MAX_SEQ_LENGTH",
            reason,
            f"Set it to {info.max_seq_length} or remove it",
        )
    if max_predictions is not None and max_predictions < info.max_predictions:
        reason = (
            f"is {max_predictions}, but {info.folder} has up to {info.max_predictions} per sequence"
        )
        remedy = f"Set it to {info.max_predictions} or remove it"
        raise UserError("config.conflict", "MAX_PREDICTIONS_PER_SEQ", reason, remedy)


def _infos(source: Source) -> tuple[StoreInfo, ...]:
    return (source,) if isinstance(source, StoreInfo) else source.listed


def _check_positions(source: Source, model: BertConfig) -> None:
    if isinstance(source, Files) and source.shape.tokens > model.max_position_embeddings:
        positions = model.max_position_embeddings
        reason = (
            f"has sequences of {source.shape.tokens} tokens, "
            f"but the model has {positions} positions"
        )
        remedy = "Raise max_position_embeddings or use data with shorter sequences"
        raise UserError("data.too-long", source.patterns, reason, remedy)


def _sums(source: Source) -> tuple[FileSum, ...]:
    return source.sums if isinstance(source, Files) else ()  # a store checks its own files


def _identity(source: Source) -> str:
    if isinstance(source, Files):
        return named_by_files(source.identity, source.content)
    return "synthetic" if source.kind == "synthetic" else source.known_as


def training_data(
    data: DataConfig, tensorflow: TensorFlowConfig, inputs: Inputs, seed: int
) -> TrainingData:
    """Return the training set of a run, unread until `open`.

    Raises UserError if it lacks the bins of BIN_COUNTS.
    """
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


def evaluation_data(
    data: DataConfig, evaluation: EvaluationConfig, inputs: Inputs
) -> EvaluationData:
    """Return the evaluation set of a run, unread until `open`.

    Raises UserError if it is too small.
    """
    source = inputs.evaluation
    vocab_size = inputs.shape.vocab_size
    rows = evaluation.eval_batch_size
    num_examples = evaluation.num_eval_examples
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
    """Return the shape of a stored set's rows: as long as its packs if used,
    else as its longest sequence.
    """
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
