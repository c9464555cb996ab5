"""Instances for masked-token and next-sentence prediction,
equal to the benchmark's generator draw by draw.

A text part (one sentence per line, a blank line between documents) and a seed give the same list of
instances, in the same order, as the published ``create_pretraining_data``. This is the Python
reference; `mlbert.data.prepare.generator` runs a compiled implementation with the same result.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlbert.data.formats.manifest import reading
from mlbert.data.formats.padded import NAMES, Widths, padded
from mlbert.data.formats.ragged import Ragged, Row
from mlbert.data.formats.static_masking import MaskingRule, mask_tokens, shuffle, truncate_pair
from mlbert.data.formats.wordpiece import WordPieceTokenizer
from mlbert.data.prepare.corpus_files import text_blocks
from mlbert.host.errors import UserError
from mlbert.host.files import open_plain

Document = list[list[int]]


MOST_PASSES = 1000  # over a text
REMEDY = "Give UTF-8 text, one sentence per line and a blank line between documents"


@dataclass(frozen=True)
class InstanceOptions:
    """Options of the generator under the benchmark's names; see
    `mlbert prepare instances --help`.
    """

    max_seq_length: int = 512
    max_predictions_per_seq: int = 76
    masked_lm_prob: float = 0.15
    short_seq_prob: float = 0.1
    dupe_factor: int = 10
    random_seed: int = 12345

    def __post_init__(self) -> None:
        longest = self.max_seq_length
        allowed = {
            "max_seq_length": (5 <= longest <= 65_535, "5 to 65535"),
            "max_predictions_per_seq": (
                1 <= self.max_predictions_per_seq <= longest,
                f"1 to {longest}",
            ),
            "masked_lm_prob": (0 < self.masked_lm_prob < 1, "a number between 0 and 1"),
            "short_seq_prob": (0 <= self.short_seq_prob <= 1, "0 to 1"),
            "dupe_factor": (1 <= self.dupe_factor <= MOST_PASSES, f"1 to {MOST_PASSES}"),
            "random_seed": (abs(self.random_seed) < 1 << 63, "a number of 63 bits"),
        }
        for name, (fine, words) in allowed.items():
            if not fine:
                raise UserError(
                    "config.range", name, f"{getattr(self, name)} is out of range", f"Use {words}"
                )


def parse_documents(lines: Iterable[str], tokenizer: WordPieceTokenizer) -> list[Document]:
    """Tokenize lines; a line that is blank after stripping starts a new document.

    Empty documents are dropped.
    """
    documents = ([tokenizer.encode(line.strip()) for line in block] for block in text_blocks(lines))
    return [
        sentences
        for document in documents
        if (sentences := [tokens for tokens in document if tokens])
    ]


def without_text(path: Path) -> UserError:
    """Return the error for a text part without a sentence."""
    return UserError("data.empty", path, "contains no text", REMEDY)


def read_documents(path: Path, tokenizer: WordPieceTokenizer) -> list[Document]:
    """Return the documents of one text part.

    Raises UserError: the file cannot be read, is not UTF-8 (names the line), or contains no text.
    """
    with reading(path, REMEDY), open_plain(path) as file:
        documents = parse_documents(decoded_lines(path, file), tokenizer)
    if not documents:
        raise without_text(path)
    return documents


def decoded_lines(path: Path, lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a text part as text, without any carriage returns, like TensorFlow's
    ``GFile.readline``. Raises UserError, which names the line that is not UTF-8.
    """
    for number, line in enumerate(lines, 1):
        try:
            yield line.replace(b"\r", b"").decode("utf-8")
        except UnicodeDecodeError as error:
            if number == 1 and line.startswith(b"\x1f\x8b"):
                raise UserError(
                    "data.encoding", path, "is compressed (gzip)", "Unpack it first"
                ) from None
            reason = f"line {number} is not UTF-8 (byte {error.start + 1} of the line)"
            raise UserError("data.encoding", path, reason, REMEDY) from None


def masking_rule(vocabulary: dict[str, int], options: InstanceOptions) -> MaskingRule:
    """Return the masking parameters from options and vocabulary."""
    return MaskingRule(
        masked_lm_prob=options.masked_lm_prob,
        max_predictions=options.max_predictions_per_seq,
        mask_id=vocabulary["[MASK]"],
        cls_id=vocabulary["[CLS]"],
        sep_id=vocabulary["[SEP]"],
        vocab_size=len(vocabulary),
    )


def create_instances(
    documents: list[Document], tokenizer: WordPieceTokenizer, options: InstanceOptions
) -> list[Row]:
    """Return all instances of one part in the benchmark's order.

    Shuffles ``documents`` in place.
    """
    rng = random.Random(options.random_seed)
    shuffle(documents, rng)
    rule = masking_rule(tokenizer.vocabulary, options)
    instances = [
        instance
        for _ in range(options.dupe_factor)
        for index in range(len(documents))
        for instance in _document_instances(documents, index, rule, options, rng)
    ]
    shuffle(instances, rng)
    return instances


def _document_instances(
    documents: list[Document],
    index: int,
    rule: MaskingRule,
    options: InstanceOptions,
    rng: random.Random,
) -> Iterator[Row]:
    """Yield the instances of one document: collect sentences up to a target length,
    then split them into A and B.
    """
    document = documents[index]
    max_tokens = options.max_seq_length - 3
    target = max_tokens
    if rng.random() < options.short_seq_prob:
        target = rng.randint(2, max_tokens)
    chunk: Document = []
    chunk_tokens = i = 0
    while i < len(document):
        chunk.append(document[i])
        chunk_tokens += len(document[i])
        if i == len(document) - 1 or chunk_tokens >= target:
            end = rng.randint(1, len(chunk) - 1) if len(chunk) >= 2 else 1
            first = [token for sentence in chunk[:end] for token in sentence]
            random_next = len(chunk) == 1 or rng.random() < 0.5
            if random_next:
                second = _random_second(documents, index, target - len(first), rng)
                i -= len(chunk) - end  # the sentences after A are used again
            else:
                second = [token for sentence in chunk[end:] for token in sentence]
            yield _instance(first, second, random_next, rule, max_tokens, rng)
            chunk = []
            chunk_tokens = 0
        i += 1


def _random_second(
    documents: list[Document], index: int, target: int, rng: random.Random
) -> list[int]:
    """Return sentences from a random position of another document,
    at least ``target`` tokens if it has that many.
    """
    for _ in range(10):
        other = rng.randint(0, len(documents) - 1)
        if other != index:
            break
    document = documents[other]
    second: list[int] = []
    for sentence in document[rng.randint(0, len(document) - 1) :]:
        second += sentence
        if len(second) >= target:
            break
    return second


def _instance(
    first: list[int],
    second: list[int],
    random_next: bool,
    rule: MaskingRule,
    max_tokens: int,
    rng: random.Random,
) -> Row:
    a, b = truncate_pair(first, second, max_tokens, rng)
    tokens = [rule.cls_id, *a, rule.sep_id, *b, rule.sep_id]
    masked, positions, labels = mask_tokens(tokens, rule, rng)
    # 16-bit arrays, because a part has hundreds of thousands.
    return array("H", masked), len(a) + 2, random_next, array("H", positions), array("H", labels)


def digest(rows: Ragged, max_seq_length: int, max_predictions: int) -> str:
    """Return the SHA-256 of the padded features in sorted order:
    each name, then the values of all rows in 32 bits.
    """
    result = hashlib.sha256()
    widths = Widths(max_seq_length, max_predictions)
    for name in sorted(NAMES):
        result.update(name.encode())
        for start in range(0, len(rows), 4096):
            piece = rows.take(np.arange(start, min(start + 4096, len(rows))))
            result.update(
                padded(piece, name, widths).astype("<f4" if "weights" in name else "<i4").tobytes()
            )
    return result.hexdigest()
