"""Train a tokenizer of any kind on text, with the ``tokenizers`` library.

=============  =====================================================================================
``bpe``        byte pairs, as of GPT-2 and ModernBERT: every text has tokens, none is unknown; a
               space belongs to the word after it
``wordpiece``  BERT's: words split at punctuation, pieces inside a word begin with ``##``
``unigram``    SentencePiece's: the most probable pieces; ``▁`` stands for the space before a word
=============  =====================================================================================

All have BERT's special tokens as ids 0 to 4, and frame a text as ``[CLS] text [SEP]``. Entries that
the text has no pieces for are ``[unused0]``, ``[unused1]``, ...

The same text produces the same tokenizer, with any number of threads. The library's trainer of
``unigram`` adds numbers in no fixed order and gives rare characters scores in no fixed order:
scores are rounded, and those of rare characters are made equal.
"""

from __future__ import annotations

import json
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from mlbert.data.formats.added_words import MULTIPLE, UNUSED, round_up
from mlbert.data.formats.library_tokenizer import BERT_NAMES, set_bert_template
from mlbert.data.formats.manifest import MAX_VOCAB_SIZE
from mlbert.data.formats.wordpiece import MAX_CHARS_PER_WORD, SPECIAL_TOKENS, UNKNOWN, clean_words
from mlbert.data.prepare.executor import Executor
from mlbert.data.prepare.readable_sources import together
from mlbert.data.prepare.vocabulary_training import (
    choose_alphabet,
    choose_case,
    least_count,
    split_words,
    train_vocabulary,
)
from mlbert.host.errors import UserError
from mlbert.host.registry import Choice, Registry

MIN_SIZE = 5 * MULTIPLE  # special tokens, and an entry for each byte
MAX_SIZE = 1 << 20
MASK = "[MASK]"
WORDPIECE = "wordpiece"
_LEAST_FREQUENCY = 2  # of a pair of pieces that becomes an entry
_LONGEST_PIECE = 16  # characters of a piece, of the kind unigram
_MOST_WORDS = 400_000  # different words kept; above that, words seen only once are dropped
_TOGETHER = 1 << 20  # characters that a process works on at a time
_SCORE_DIGITS = 3  # decimal places of a logarithm of a probability
_LIBRARY_STEP = 0.0001  # between the scores that the library gives to rare characters
_STEP_TOLERANCE = 0.001  # of such a step
_UNUSED_SCORE = -1000.0  # of an entry that no text has
_WAIT_SECONDS = 0.1

KINDS = Registry(
    {
        "bpe": Choice("mlbert.data.prepare.tokenizer_training:train_bpe"),
        WORDPIECE: Choice("mlbert.data.prepare.tokenizer_training:train_wordpiece"),
        "unigram": Choice("mlbert.data.prepare.tokenizer_training:train_unigram"),
    }
)


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer, the number of entries that are not ``[unused]``, and what was decided by the
    text, in words for the user.
    """

    library: Tokenizer
    num_learnt: int
    decision: str = ""


def check_kind(kind: str) -> None:
    """Raise UserError if there is no such kind of tokenizer."""
    if kind not in KINDS:
        raise UserError(
            "config.choice",
            f"--kind {kind}",
            "is not a known kind",
            "Give a known one",
            choices=KINDS,
        )


def check_size(kind: str, size: int) -> None:
    """Raise UserError for a number of entries that is out of range or not a multiple of 64."""
    most = MAX_VOCAB_SIZE if kind == WORDPIECE else MAX_SIZE
    if not MIN_SIZE <= size <= most:
        remedy = f"Give {MIN_SIZE} to {most}"
        raise UserError("config.range", "--size", f"{size} is out of range", remedy)
    if size % MULTIPLE:
        above = round_up(size)
        raise UserError(
            "config.range", "--size", f"{size} is not a multiple of {MULTIPLE}", f"Give {above}"
        )


def check_case(kind: str, lower_case: bool | None) -> None:
    """Raise UserError if the case is chosen for a kind that keeps it."""
    if lower_case is not None and kind != WORDPIECE:
        reason = f"applies only to --kind {WORDPIECE}"
        raise UserError("config.conflict", "--cased/--lower-case", reason, "Remove it")


def train_tokenizer(
    kind: str,
    texts: Iterable[str],
    size: int,
    lower_case: bool | None = None,
    executor: Executor = Executor(),
) -> TrainedTokenizer:
    """Train a tokenizer.

    Args:
        kind: one of `KINDS`.
        texts: the documents, which are read once.
        size: number of entries, with unused ones; WordPiece takes more if the alphabet needs it.
        lower_case: remove case and accents; None decides by the text. Only for WordPiece.
        executor: processes that count words.

    Raises:
        UserError: the size is out of range, or smaller than the alphabet of the text needs.
    """
    check_size(kind, size)
    train: Callable[..., TrainedTokenizer] = KINDS.load(kind)
    trained = train(texts, size, lower_case, executor)
    filled = _fill(trained.library, max(size, round_up(trained.library.get_vocab_size())))
    set_bert_template(filled, BERT_NAMES)
    takes_space = kind != WORDPIECE  # which has no tokens for spaces
    filled.add_special_tokens(
        [
            AddedToken(token, lstrip=takes_space and token == MASK, normalized=False, special=True)
            for token in SPECIAL_TOKENS
        ]
    )
    return TrainedTokenizer(filled, trained.num_learnt, trained.decision)


def train_bpe(
    texts: Iterable[str], size: int, lower_case: bool | None, executor: Executor
) -> TrainedTokenizer:
    """Train byte pairs on the words that GPT-2's pattern finds. Case is kept."""
    del lower_case, executor  # the library counts words in its own threads
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=_LEAST_FREQUENCY,
        special_tokens=[*SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    _train(tokenizer, trainer, texts)
    return TrainedTokenizer(tokenizer, tokenizer.get_vocab_size())


def train_wordpiece(
    texts: Iterable[str], size: int, lower_case: bool | None, executor: Executor
) -> TrainedTokenizer:
    """Train a vocabulary as `mlbert pretrain` does, for BERT's tokenizer."""
    raw = count_words(texts, clean_words, executor)
    found, reason = choose_case(raw)
    is_lower = found if lower_case is None else lower_case
    words = split_words(raw, is_lower)
    entries = train_vocabulary(words, size, least_count(words))
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lower, strip_accents=is_lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    what = "removed" if is_lower else "kept"
    why = "as asked" if lower_case is not None else f"because {reason}"
    return TrainedTokenizer(tokenizer, len(entries), f"case and accents: {what}, {why}")


def train_unigram(
    texts: Iterable[str], size: int, lower_case: bool | None, executor: Executor
) -> TrainedTokenizer:
    """Train the pieces of a unigram language model. Case is kept; characters outside the alphabet
    (`mlbert.data.prepare.vocabulary_training.choose_alphabet`) become [UNK].

    Raises UserError: the alphabet has more characters than the size.
    """
    del lower_case
    words = count_words(texts, _normalized_words, executor)
    alphabet = choose_alphabet(words, least_count(words))
    known = {word: count for word, count in sorted(words.items()) if alphabet.issuperset(word)}
    least = len(SPECIAL_TOKENS) + len(alphabet) + 1  # 1: the space
    if least > size:
        reason = f"{size} is too small for the {len(alphabet)} characters of the text"
        raise UserError("config.range", "--size", reason, f"Give {round_up(least)} or more")
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL_TOKENS],
        unk_token=UNKNOWN,
        max_piece_length=_LONGEST_PIECE,
        show_progress=False,
    )
    _train(tokenizer, trainer, (" ".join([word] * count) for word, count in known.items()))
    content = json.loads(tokenizer.to_str())
    pieces = [(piece, score) for piece, score in content["model"]["vocab"]]
    content["model"]["vocab"] = _in_fixed_order(pieces)
    content["model"]["unk_id"] = SPECIAL_TOKENS.index(UNKNOWN)
    tokenizer = Tokenizer.from_str(json.dumps(content))
    # As SentencePiece: compatible characters become one, white space of any kind one space. The
    # space after [MASK] belongs to the next word.
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(left=False, right=True),
        ]
    )
    # Only the first word of a text gets a space: what follows [MASK] may be a comma.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return TrainedTokenizer(tokenizer, tokenizer.get_vocab_size())


def count_words(
    texts: Iterable[str], split: Callable[[str], list[str]], executor: Executor
) -> Counter[str]:
    """Count the words into which ``split`` divides each text; very long ones do not count.

    If there are too many different ones, those seen only once are dropped.
    """
    words: Counter[str] = Counter()
    count = partial(_count, split)
    with executor.stream(count, together(texts, _TOGETHER), "the text") as counted:
        for _, some in counted:
            words.update(some)
            if len(words) > _MOST_WORDS:
                words = Counter({word: count for word, count in words.items() if count > 1})
    return words


def _count(split: Callable[[str], list[str]], texts: list[str]) -> Counter[str]:
    return Counter(
        word for text in texts for word in split(text) if len(word) <= MAX_CHARS_PER_WORD
    )


def _normalized_words(text: str) -> list[str]:
    return unicodedata.normalize("NFKC", text).split()


def _train(tokenizer: Tokenizer, trainer: Any, texts: Iterable[str]) -> None:
    """Train in a thread: the library does not notice Ctrl-C, which ends this program at once."""
    errors: list[BaseException] = []

    def read() -> Iterator[str]:
        try:
            yield from texts
        except BaseException as error:  # the library would replace it by another one
            errors.append(error)
            raise

    def run() -> None:
        try:
            tokenizer.train_from_iterator(read(), trainer)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_WAIT_SECONDS)
    if errors:
        raise errors[0]


def _in_fixed_order(pieces: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the pieces of a unigram model with scores that do not depend on the order in which the
    library visited the words: special tokens first, then by score.

    The library gives characters that are no piece of the model the lowest score, plus steps in no
    fixed order. Here all of them get the lowest score.
    """
    others = [pair for pair in pieces if pair[0] not in SPECIAL_TOKENS]
    lowest = min(score for _, score in others)
    scores: dict[str, float] = {}
    for piece, score in others:
        steps = (score - lowest) / _LIBRARY_STEP
        is_rare = len(piece) == 1 and abs(steps - round(steps)) < _STEP_TOLERANCE
        if is_rare and steps < len(others):
            score = lowest
        scores[piece] = round(score, _SCORE_DIGITS)
    special = [(piece, 0.0) for piece in SPECIAL_TOKENS]
    ordered = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))
    return [*special, *ordered]


def _fill(tokenizer: Tokenizer, size: int) -> Tokenizer:
    """Return a tokenizer with unused entries at the end."""
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    names = [UNUSED.format(number) for number in range(size - len(model["vocab"]))]
    if model["type"] == "Unigram":
        model["vocab"] += [(name, _UNUSED_SCORE) for name in names]
    else:
        first = len(model["vocab"])
        model["vocab"] |= {name: first + number for number, name in enumerate(names)}
    return Tokenizer.from_str(json.dumps(content))
