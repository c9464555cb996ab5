"""Prepare a complete data folder from documents: text, vocabulary,
training and evaluation sets, and baselines.

Every step writes its files under a temporary name first, and ``prepared.json`` is written last.
After an interruption, a rerun produces the same files. On a folder that is finished with the same
options, it does nothing.

The WordPiece vocabulary is trained with the ``tokenizers`` library; the same text produces the same
file. The baselines are the accuracy of guessing without a model, which a trained model must clearly
beat. Here they are measured on stored samples like the benchmark's, where a tenth of the tokens to
predict stay visible, which a model can copy.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from mlbert.data.formats.checksums import FileSum
from mlbert.data.formats.manifest import (
    MAX_VOCAB_SIZE,
    Manifest,
    file_sha256,
    make_folder,
    read_manifest,
    write_json,
)
from mlbert.data.formats.open import check_vocabulary
from mlbert.data.formats.prepared import ShardSet, ShardWriter, info_of
from mlbert.data.formats.ragged import Ragged
from mlbert.data.formats.tokenizer import lower_cases
from mlbert.data.formats.tokenizer_files import TOKENIZER_CONFIG, VOCAB_FILE
from mlbert.data.formats.wordpiece import (
    SPECIAL_TOKENS,
    UNKNOWN,
    basic_split,
    clean_words,
    load_vocabulary,
)
from mlbert.data.prepare import corpus as corpora
from mlbert.data.prepare.generator import FlatDocuments, Generator, flat, make_generator
from mlbert.data.prepare.instance_set import InstanceJob, make_instances
from mlbert.data.prepare.instances import InstanceOptions
from mlbert.data.prepare.jobs import (
    LOCAL,
    Executor,
    inspect_parts,
    is_whole,
    read_summary,
    tool_name,
    whole_shards,
)
from mlbert.data.prepare.shuffle import pick_evenly
from mlbert.host.errors import UserError
from mlbert.host.files import remove_leftovers, write_atomically
from mlbert.host.json_files import add_checksum, read_json

MIN_VOCAB_SIZE = 200
MAX_ALPHABET = 500
_TOGETHER = 1 << 21  # pairs counted at a time
FINISHED = "prepared.json"  # written last: options and results
BASELINES = "baselines.json"  # accuracies of guessing without a model
_BEGUN = ".begun"  # marks a folder from the first file until it is finished
_MADE = ("text", "train", "eval", VOCAB_FILE, TOKENIZER_CONFIG, BASELINES)  # before FINISHED
# Largest values of options; the smallest is 1.
_MOST = {"eval_sequences": 10_000_000, "num_parts": 99_999, "max_document_sentences": 1_000_000}


def count_words(sentences: Iterable[str], lower_case: bool = True) -> Counter[str]:
    """Count the basic words of sentences, split like the benchmark's tokenizer does."""
    return split_words(
        Counter(word for sentence in sentences for word in clean_words(sentence)), lower_case
    )


def split_words(raw: Counter[str], lower_case: bool = True) -> Counter[str]:
    """Split words that are separated by white space into basic words, and add up their counts."""
    words: Counter[str] = Counter()
    for word, count in raw.items():
        for part in basic_split(word, lower_case):
            words[part] += count
    return words


def check_vocab_size(vocab_size: int) -> None:
    """Raise UserError for a size that is too small to be useful or too large for 16 bits."""
    if not MIN_VOCAB_SIZE <= vocab_size <= MAX_VOCAB_SIZE:
        remedy = f"Use {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}"
        raise UserError("config.range", "--vocab-size", f"{vocab_size} is out of range", remedy)


def train_vocabulary(
    words: Counter[str], vocab_size: int, least_count: int | None = None
) -> list[str]:
    """Return ``vocab_size`` entries of a WordPiece vocabulary, special tokens first; fewer if the
    words (with their counts) do not have enough different pieces. Raises UserError: the size is out
    of range.

    Words with characters outside the alphabet become [UNK]: WordPiece cannot spell them in bytes.
    The alphabet is the `MAX_ALPHABET` most frequent characters or, with ``least_count``, all that
    occur so often; the vocabulary then grows until it takes up at most three quarters of the
    entries.
    """
    check_vocab_size(vocab_size)
    alphabet = _alphabet(words, least_count)
    known = {word: count for word, count in sorted(words.items()) if alphabet.issuperset(word)}
    # The trainer numbers pieces inside words in no fixed order and breaks ties by number, so two
    # runs would produce different vocabularies. Declared as special tokens, they are numbered first
    # and in this order.
    inside = sorted({char for word in known for char in word[1:]})
    if least_count is not None:
        vocab_size = min(max(vocab_size, 4 * (len(alphabet) + len(inside)) // 3), MAX_VOCAB_SIZE)
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS, *(f"##{char}" for char in inside)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (" ".join([word] * count) for word, count in known.items()), trainer
    )
    numbers = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def _alphabet(words: Counter[str], least_count: int | None) -> set[str]:
    characters = count_characters(words)
    if least_count is not None:
        return {char for char, count in characters.items() if count >= least_count}
    return set(sorted(characters, key=lambda char: (-characters[char], char))[:MAX_ALPHABET])


def count_characters(words: Counter[str]) -> Counter[str]:
    """Count the characters of words with their counts."""
    characters: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            characters[char] += count
    return characters


Accuracies = dict[str, float | int | str]


class Neighbours:
    """Counts tokens and pairs of neighbours of a training text, which is added in parts.

    Args:
        vocab_size: V.
        most_pairs: stop counting pairs once there are this many different ones (None: no limit).
        never_guessed: ids that are no guess, because they are never masked.
    """

    def __init__(
        self,
        vocab_size: int,
        most_pairs: int | None = None,
        never_guessed: Sequence[int] = (),
    ) -> None:
        self._never_guessed = np.zeros(vocab_size, bool)
        self._never_guessed[list(never_guessed)] = True
        self._size = vocab_size
        self._most_pairs = most_pairs
        self._tokens = np.zeros(vocab_size, np.int64)
        self._pairs = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._waiting: list[np.ndarray] = []  # pairs not yet counted
        self._num_waiting = 0

    def add(self, tokens: np.ndarray, has_next: np.ndarray) -> None:
        """Count tokens (int [T]); ``has_next`` bool [T] is whether the next token is a neighbour,
        False for the last.
        """
        tokens = tokens.astype(np.int64)
        np.add.at(self._tokens, tokens, 1)
        if self._most_pairs is not None and len(self._pairs) >= self._most_pairs:
            return
        self._waiting.append((tokens[:-1] * self._size + tokens[1:])[has_next[:-1]])
        self._num_waiting += len(self._waiting[-1])
        if self._num_waiting > _TOGETHER:
            self._count()

    def _count(self) -> None:
        found, counts = np.unique(
            np.concatenate([np.empty(0, np.int64), *self._waiting]), return_counts=True
        )
        self._pairs, places = np.unique(np.concatenate([self._pairs, found]), return_inverse=True)
        sums = np.bincount(
            places, np.concatenate([self._counts, counts]), minlength=len(self._pairs)
        )
        self._counts = sums.astype(np.int64)
        self._waiting = []
        self._num_waiting = 0

    def accuracies(self, evaluation: Ragged) -> Accuracies:
        """Return the accuracies that `baselines` describes."""
        self._count()
        most_frequent = int(np.where(self._never_guessed, -1, self._tokens).argmax())
        first, second = np.divmod(self._pairs, self._size)
        after = self._best_guess(first, second, most_frequent)
        before = self._best_guess(second, first, most_frequent)
        starts = np.repeat(evaluation.offsets[:-1], np.diff(evaluation.masked_offsets))
        where = starts + evaluation.masked_positions
        labels = evaluation.masked_labels.astype(np.int64)
        # in range: [CLS], [SEP] stay
        left = evaluation.tokens[where - 1]
        right = evaluation.tokens[where + 1]
        accuracy = {
            "most_frequent_accuracy": float(np.mean(labels == most_frequent)),
            "bigram_left_accuracy": float(np.mean(labels == after[left])),
            "bigram_right_accuracy": float(np.mean(labels == before[right])),
        }
        best = max(accuracy["bigram_left_accuracy"], accuracy["bigram_right_accuracy"])
        return {
            **accuracy,
            "bigram_accuracy": best,
            "most_frequent_id": most_frequent,
            "masked_tokens": len(labels),
        }

    def _best_guess(self, given: np.ndarray, wanted: np.ndarray, otherwise: int) -> np.ndarray:
        """Return int64 [V]: the most frequent neighbour of each token,
        or ``otherwise`` for tokens that were never seen.
        """
        guess = np.full(self._size, otherwise, np.int64)
        # The last write wins: highest count, then lowest id.
        order = np.lexsort((-wanted, self._counts))
        order = order[~self._never_guessed[wanted[order]]]
        guess[given[order]] = wanted[order]
        return guess


def baselines(
    train: Sequence[FlatDocuments],
    evaluation: Ragged,
    vocab_size: int,
    never_guessed: Sequence[int] = (),
) -> Accuracies:
    """Return the masked-token accuracies (0 to 1) of guessers with counts from the training text:
    always the most frequent token; by the left neighbour; by the right neighbour; and the better of
    the last two (bigram_accuracy). A neighbour is what the model sees, so it may be masked itself.
    ``never_guessed``: see `Neighbours`.
    """
    neighbours = Neighbours(vocab_size, never_guessed=never_guessed)
    tokens = np.concatenate([part.tokens for part in train])
    lengths = np.concatenate([np.diff(part.sentences) for part in train])
    inside = np.ones(len(tokens), bool)
    inside[np.cumsum(lengths) - 1] = False  # nothing follows the last token of a sentence
    neighbours.add(tokens, inside)
    return neighbours.accuracies(evaluation)


@dataclass(frozen=True)
class TextOptions:
    """Options of a preparation from text."""

    instances: InstanceOptions
    vocab_size: int = 4096  # entries to train
    lower_case: bool = True
    eval_share: float = 0.05  # fraction of the documents held out
    eval_sequences: int = 2000  # at most; fewer if the text is too short
    split_seed: int = 0  # selects the held-out documents
    num_parts: int = 2  # training text parts, one shard each
    max_document_sentences: int = 32  # longer documents are cut into pieces

    def __post_init__(self) -> None:
        if not 0 < self.eval_share < 1:
            reason = f"{self.eval_share} is not between 0 and 1"
            raise UserError("config.range", "--eval-share", reason, "Use for example 0.05")
        check_vocab_size(self.vocab_size)
        for name, most in _MOST.items():
            if not 1 <= getattr(self, name) <= most:
                raise UserError(
                    "config.range",
                    name,
                    f"{getattr(self, name)} is out of range",
                    f"Use 1 to {most}",
                )


def _finished(out: Path, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return the summary of a folder that was finished with the same options.

    Raises UserError for other options, so that nothing is overwritten.
    """
    if (summary := read_summary(out / FINISHED)) is None:
        return None
    if (found := summary["options"]) != json.loads(json.dumps(options)):
        different = sorted(key for key in {*found, *options} if found.get(key) != options.get(key))
        reason = f"was prepared with other options ({', '.join(different)})"
        raise UserError(
            "prepare.other-options", out, reason, "Choose another --out, or remove the folder"
        )
    return summary


def _begin(out: Path) -> None:
    """Create and mark the folder.

    Raises UserError if this would replace something that it did not make.
    """
    made = [out / name for name in _MADE if (out / name).exists()]
    if made and not (out / _BEGUN).exists() and not (out / FINISHED).exists():
        reason = "was not made by this command"
        raise UserError("file.in-the-way", made[0], reason, "Choose another --out")
    make_folder(out / "text")
    write_atomically(out / _BEGUN, "")


def prepare_text(
    documents: Iterable[list[str]],
    out: Path,
    options: TextOptions,
    source: dict[str, Any],
    executor: Executor = LOCAL,
) -> dict[str, Any]:
    """Make a data folder (vocab.txt, tokenizer_config.json, text/, train/, eval/, baselines.json,
    prepared.json) and return the content of ``prepared.json``. ``documents`` (lists of sentences)
    are read only if the folder is not finished yet. ``source`` identifies them: it is stored, and
    compared on a rerun.
    """
    wanted = {"source": source, **asdict(options)}
    progress = executor.progress
    found = _finished(out, wanted)
    if found and is_whole(out, lambda: _check_sets(out, found), progress):
        return found
    started = time.monotonic()
    _begin(out)
    for folder in (out, out / "text"):
        remove_leftovers(folder)
    corpus = corpora.split(
        documents,
        options.eval_share,
        options.split_seed,
        max_sentences=options.max_document_sentences,
    )
    counts = corpus.summary()
    progress(
        "text: " + ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in counts.items())
    )
    parts = _write_parts(out / "text", corpus, options.num_parts)
    vocab_file = _make_vocabulary(corpus, out, options)
    vocabulary = load_vocabulary(vocab_file)
    progress(f"vocabulary: {len(vocabulary):,} entries")
    provenance = {"tool": tool_name(), "options": wanted}
    job = InstanceJob(
        tuple(parts), vocab_file, out / "train", options.instances, options.lower_case
    )
    quiet = Executor(executor.workers)
    train = make_instances(job, inspect_parts(parts, executor=quiet), provenance, quiet)
    progress(f"train: {train.num_sequences:,} sequences, {train.num_tokens:,} tokens")
    generator = make_generator(vocabulary, options.lower_case)
    evaluation = _make_evaluation(out, generator, options, provenance)
    progress(
        f"eval: {evaluation.num_sequences:,} sequences, {evaluation.num_masked:,} masked tokens"
    )
    guesses = _write_baselines(out, [flat(generator.read(part)) for part in parts], vocabulary)
    summary = {
        "options": wanted,
        "text": counts,
        "baselines": guesses,
        "train_sequences": train.num_sequences,
        "eval_sequences": evaluation.num_sequences,
        "vocab_size": train.vocab_size,
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(out / FINISHED, add_checksum(summary))
    (out / _BEGUN).unlink()
    return summary


def _check_sets(out: Path, summary: dict[str, Any]) -> list[FileSum]:
    """Return the checksums of both sets.

    Raises UserError: another file of the finished folder is damaged.
    """
    if lower_cases(out / VOCAB_FILE) != summary["options"]["lower_case"]:
        raise UserError(
            "data.damaged", out / TOKENIZER_CONFIG, "has another do_lower_case than the sets"
        )
    if read_json(out / BASELINES, "") != summary["baselines"]:
        raise UserError("data.damaged", out / BASELINES, f"differs from {FINISHED}")
    manifests = [read_manifest(out / name) for name in ("train", "eval")]
    for manifest in manifests:
        check_vocabulary(info_of(manifest), out / VOCAB_FILE)
    return whole_shards(*manifests)


def _make_vocabulary(corpus: corpora.Corpus, out: Path, options: TextOptions) -> Path:
    words = count_words(
        (text for document in corpus.train for text in document), options.lower_case
    )
    entries = train_vocabulary(words, options.vocab_size)
    path = out / VOCAB_FILE
    write_atomically(path, "\n".join(entries) + "\n")
    write_json(
        out / TOKENIZER_CONFIG,
        {"tokenizer_class": "BertTokenizer", "do_lower_case": options.lower_case},
    )
    return path


def _write_parts(folder: Path, corpus: corpora.Corpus, num_parts: int) -> list[Path]:
    if len(corpus.train) < num_parts:
        reason = f"{len(corpus.train)} training documents cannot fill {num_parts} parts"
        raise UserError("data.too-small", "--parts", reason, "Use fewer parts or more text")
    for earlier in folder.glob("train-?????-of-?????.txt"):
        earlier.unlink()  # of an interrupted run, perhaps with another number of parts
    parts = []
    for part in range(num_parts):
        path = folder / f"train-{part:05d}-of-{num_parts:05d}.txt"
        corpora.write_text(path, corpus.train[part::num_parts])
        parts.append(path)
    corpora.write_text(folder / "eval.txt", corpus.evaluation)
    return parts


def _make_evaluation(
    out: Path, generator: Generator, options: TextOptions, provenance: dict[str, Any]
) -> Manifest:
    """Mask once, then pick ``eval_sequences`` examples evenly,
    like the benchmark picks its 10,000.
    """
    documents = generator.read(out / "text" / "eval.txt")
    rows = generator.rows(documents, replace(options.instances, dupe_factor=10))
    wanted = min(options.eval_sequences, len(rows))
    writer = ShardWriter(out / "eval", 1, "")
    writer.clear_leftovers()
    writer.write_shard(0, rows.take(pick_evenly(len(rows), wanted)))
    return writer.finish(
        vocabulary={
            "sha256": file_sha256(out / VOCAB_FILE),
            "size": len(generator.tokenizer.vocabulary),
        },
        max_seq_length=options.instances.max_seq_length,
        max_predictions=options.instances.max_predictions_per_seq,
        provenance=provenance,
    )


def _write_baselines(
    out: Path, train: list[FlatDocuments], vocabulary: dict[str, int]
) -> dict[str, Any]:
    (rows,) = ShardSet.open(out / "eval")
    result = baselines(train, rows, len(vocabulary))
    entries = {number: entry for entry, number in vocabulary.items()}
    result["most_frequent_token"] = entries[int(result.pop("most_frequent_id"))]
    write_json(out / BASELINES, result)
    return result
