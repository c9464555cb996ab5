"""Settings of the data: sets, batches, text and tasks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mlbert.config.section import Contradiction, Ranges, Section, fixed_setting, is_count, setting


class DataConfig(Section):
    """Data sets, batches and packing."""

    input_dir: Path = setting(
        "DATADIR_PHASE2",
        "Training set: a prepared set, TFRecords, or HDF5 shards from NVIDIA's scripts.",
    )
    eval_dir: Path = setting("EVALDIR", "Evaluation set, in one of the same formats.")
    data_reader: Literal["auto", "dali"] = setting(
        "DATA_READER", "dali: read TFRecord training sets with NVIDIA DALI.", default="auto"
    )
    train_batch_size: int = setting(
        "BATCHSIZE", "Packs per optimizer step.", unit="packs per rank and step", **Ranges.PACKS
    )
    gradient_accumulation_steps: int = fixed_setting(
        "GRADIENT_STEPS",
        "Parts of a step's batch; divides BATCHSIZE.",
        default=1,
        unit="micro-batches",
        **Ranges.PACKS,
    )
    average_packing_rate: float = setting(
        "PACKING_FACTOR",
        "Nominal average; global_batch_size is BATCHSIZE * ranks * PACKING_FACTOR.",
        **Ranges.IN_PACK | {"unit": "sequences per pack"},
    )
    max_sequences_per_pack: int = fixed_setting(
        "MAX_SEQUENCES_PER_PACK",
        "Maximum number of sequences in a pack; 1 disables packing. "
        "Text is packed by tokens: on average over a micro-batch.",
        default=1,
        **Ranges.IN_PACK,
    )
    max_seq_length: int | None = fixed_setting(
        "MAX_SEQ_LENGTH",
        "Maximum length of sequences made from text.",
        default=None,
        **Ranges.TOKENS | {"ge": 8},
    )
    max_predictions_per_seq: int | None = setting(
        "MAX_PREDICTIONS_PER_SEQ",
        "Maximum number of masked tokens per sequence.",
        default=None,
        **Ranges.TOKENS,
    )
    bin_counts: str | None = fixed_setting(
        "BIN_COUNTS",
        "Sequences of BATCHSIZE to take from each length bin, shortest first: 6 3 2 5; "
        "none: in proportion.",
        default=None,
        unit="sequences",
    )
    exchange_padding: Literal["off", "group", "all"] = fixed_setting(
        "EXCHANGE_PADDING",
        "Ranks that redistribute each micro-batch's packs by length to balance tokens: "
        "none, those of a node, or all.",
        default="off",
    )
    synthetic_data: bool = setting(
        "SYNTH_DATA", "Train on random tokens; needs no files.", default=False
    )

    @property
    def counts_of_bins(self) -> tuple[int, ...] | None:
        """BIN_COUNTS as numbers. Raises ValueError if they are not positive integers."""
        if self.bin_counts is None:
            return None
        words = self.bin_counts.replace(",", " ").split()
        counts = tuple(int(word) for word in words if is_count(word))
        if not words or len(counts) < len(words) or 0 in counts:
            raise ValueError(self.bin_counts)
        return counts

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield contradictions of batch, packing and bins;
        `mlbert.data.formats.bins.check_counts` compares with the data.
        """
        packs = self.train_batch_size
        parts = self.gradient_accumulation_steps
        if packs % parts:
            problem = f"{parts} does not divide BATCHSIZE {packs}"
            remedy = (
                "BATCHSIZE counts the packs of all accumulation steps together; "
                "choose one that is divisible"
            )
            yield Contradiction("config.conflict", "GRADIENT_STEPS", problem, remedy)
        rate = self.average_packing_rate
        most = self.max_sequences_per_pack
        if rate > most:
            problem = f"is {rate:g} while MAX_SEQUENCES_PER_PACK is {most}"
            remedy = "Set PACKING_FACTOR=1 for unpacked training, or allow more sequences"
            yield Contradiction("config.conflict", "PACKING_FACTOR", problem, remedy)
        yield from self._contradictions_of_bins()

    def _contradictions_of_bins(self) -> Iterator[Contradiction]:
        try:
            counts = self.counts_of_bins
        except ValueError:
            problem = f"{self.bin_counts!r} is not a list of positive integers"
            yield Contradiction("config.value", "BIN_COUNTS", problem, 'Give for example "6 3 2 5"')
            return
        if counts is None:
            return
        if sum(counts) != self.train_batch_size:
            problem = (
                f"{self.bin_counts!r} sums to {sum(counts)}, BATCHSIZE is {self.train_batch_size}"
            )
            remedy = "Make them sum to BATCHSIZE, which includes all accumulation steps"
            yield Contradiction("config.conflict", "BIN_COUNTS", problem, remedy)
        if self.max_sequences_per_pack > 1:
            problem = (
                f"is set while MAX_SEQUENCES_PER_PACK is {self.max_sequences_per_pack}: "
                "packs have no bins"
            )
            remedy = "Set MAX_SEQUENCES_PER_PACK=1, or unset BIN_COUNTS"
            yield Contradiction("config.conflict", "BIN_COUNTS", problem, remedy)
        if self.synthetic_data:
            problem = "cannot be combined with SYNTH_DATA: random tokens have no bins"
            yield Contradiction("config.conflict", "BIN_COUNTS", problem, "Unset one of them")


class TextConfig(Section):
    """Text that is tokenized when it is read."""

    tokenizer: str = setting(
        "TOKENIZER",
        "Vocabulary for text: a vocab.txt or tokenizer.json, its folder, or the name of a model.",
    )
    shuffle: Literal["naive", "py1s", "py2s", "py1b", "py1br", "py1e", "blocks"] | None = (
        fixed_setting(
            "SHUFFLE",
            "Shuffle algorithm, as named by MosaicML Streaming; blocks: a formula, which needs "
            "neither memory nor a file for any number of texts; none: the order of the files.",
            default=None,
        )
    )
    drop_last: bool | None = fixed_setting(
        "DROP_LAST", "Drop an epoch's last step if it is not full.", default=None
    )


class CorpusConfig(Section):
    """A text corpus to pre-train on; masks are drawn each time it is read."""

    data_remote: str | None = setting(
        "DATA_REMOTE",
        "Folder or URL that DATADIR_PHASE2 is a local copy of; "
        "none: DATADIR_PHASE2 is the set itself.",
        default=None,
    )
    eval_remote: str | None = setting("EVAL_REMOTE", "The same for EVALDIR.", default=None)
    data_streams: str | None = setting(
        "DATA_STREAMS",
        "Several sets to mix, in JSON: local, remote, and proportion, repeat or choose of each; "
        "none: DATADIR_PHASE2.",
        default=None,
    )
    eval_streams: str | None = setting("EVAL_STREAMS", "The same for EVALDIR.", default=None)
    long_texts: Literal["split", "truncate"] | None = fixed_setting(
        "LONG_TEXTS",
        "Texts longer than MAX_SEQ_LENGTH: split them into several sequences, or truncate them.",
        default=None,
    )
    shuffle_seed: int | None = fixed_setting(
        "SHUFFLE_SEED", "Seed of SHUFFLE.", default=None, ge=0, le=4294967295
    )
    canonical_nodes: int | None = fixed_setting(
        "CANONICAL_NODES",
        "Parts of the set that are shuffled and read in parallel.",
        default=None,
        ge=1,
        le=65536,
    )
    cache_limit: float | None = setting(
        "CACHE_LIMIT",
        "Disk space on each machine for local copies of the training set, shards and tokens; the "
        "least recently used are deleted first. none: no limit.",
        default=None,
        unit="GB",
        gt=0,
        le=1e9,
    )
    loader_threads: int = setting(
        "LOADER_THREADS",
        "Threads that mask and pack batches ahead of training, in each process.",
        default=1,
        ge=1,
        le=64,
    )
    masking_rate: float = fixed_setting(
        "MASKING_RATE", "Probability that a token is predicted.", **Ranges.PROBABILITY
    )
    masking_rate_end: float | None = fixed_setting(
        "MASKING_RATE_END",
        "MASKING_RATE at the end of training; none: constant.",
        default=None,
        **Ranges.PROBABILITY,
    )
    masking_schedule: Literal["constant", "linear", "cosine", "step"] | None = fixed_setting(
        "MASKING_SCHEDULE",
        "How the masking rate changes; step: halfway through training.",
        default=None,
    )
    eval_masking_rate: float | None = setting(
        "EVAL_MASKING_RATE", "MASKING_RATE for evaluation.", default=None, **Ranges.PROBABILITY
    )
    eval_masking: Literal["bert", "mask"] = setting(
        "EVAL_MASKING",
        "What evaluation shows for a token to predict; "
        "bert: 80 % [MASK], 10 % a random token, 10 % unchanged; mask: [MASK].",
        default="bert",
    )


class BatchGrowthConfig(Section):
    """Batch-size warm-up: a batch that grows to BATCHSIZE."""

    batchsize_warmup_start: int | None = fixed_setting(
        "BATCHSIZE_WARMUP_START",
        "BATCHSIZE of the first step; it grows by one at a time.",
        default=None,
        unit="packs per rank and step",
        **Ranges.PACKS,
    )
    batchsize_warmup_steps: int | None = fixed_setting(
        "BATCHSIZE_WARMUP_STEPS",
        "Steps until the batch has grown to BATCHSIZE.",
        default=None,
        **Ranges.STEPS,
    )
    batchsize_warmup_tokens: int | None = fixed_setting(
        "BATCHSIZE_WARMUP_TOKENS",
        "Tokens without padding, of all ranks, until the batch has grown to BATCHSIZE; replaces "
        "BATCHSIZE_WARMUP_STEPS.",
        default=None,
        unit="tokens",
        ge=1,
        le=10**15,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield a contradiction unless the start and one length are given, or neither."""
        lengths = {
            "BATCHSIZE_WARMUP_STEPS": self.batchsize_warmup_steps,
            "BATCHSIZE_WARMUP_TOKENS": self.batchsize_warmup_tokens,
        }
        given = [name for name, value in lengths.items() if value is not None]
        if len(given) == len(lengths):
            steps, tokens = given
            problem = f"is set, and {steps} is, too"
            yield Contradiction("config.conflict", tokens, problem, "Remove one of them")
        start = "BATCHSIZE_WARMUP_START"
        if given and self.batchsize_warmup_start is None:
            yield _missing(start, given[0])
        if not given and self.batchsize_warmup_start is not None:
            yield _missing("BATCHSIZE_WARMUP_STEPS", start)


def _missing(missing: str, given: str) -> Contradiction:
    remedy = f"Give both, or remove {given}"
    return Contradiction("config.missing", missing, f"is not set, but {given} is", remedy)


class TaskConfig(Section):
    """A task to fine-tune on: files with columns, or a GLUE task."""

    task: str | None = fixed_setting(
        "TASK", "GLUE task to fine-tune on; none: files with columns.", default=None
    )
    text_columns: str | None = fixed_setting(
        "TEXT_COLUMNS",
        "Column of the task's text, or two columns separated by a comma.",
        default=None,
    )
    label_column: str | None = fixed_setting(
        "LABEL_COLUMN", "Column of the task's label.", default=None
    )
    num_labels: int | None = fixed_setting(
        "NUM_LABELS", "Number of classes; 1 for regression.", default=None, ge=1, le=100000
    )
    label_kind: Literal["one", "set", "tags"] = fixed_setting(
        "LABEL_KIND",
        "one: a class or a number for each row; set: any number of classes; "
        "tags: a class for each word.",
        default="one",
    )
    skip_bad: bool = fixed_setting("SKIP_BAD", "Leave out rows without a label.", default=False)
    standardize: bool = fixed_setting(
        "STANDARDIZE_LABELS",
        "Scale numbers to mean 0 and standard deviation 1; predictions have the original unit.",
        default=False,
    )
    class_weights: Literal["none", "balanced"] = fixed_setting(
        "CLASS_WEIGHTS",
        "Weight of a class in the loss; balanced: its share of the rows, inverted.",
        default="none",
    )
    metric: str | None = setting(
        "METRIC", "Task metric that is compared with TARGET_MLM_ACCURACY.", default=None
    )
