"""Read the files of a BERT tokenizer, as `transformers` and `tokenizers` write them.

A tokenizer is a vocabulary and rules for the text before words are looked up. It is read from
``vocab.txt`` or ``tokenizer.json`` and from the files next to it. Any other property that changes
token ids (added tokens, another normalizer, other special tokens, another class) is an error that
names the file and the property: ids that differ from those that a model was trained with would go
unnoticed.

Which file decides: for BERT's tokenizer classes, `transformers` takes the vocabulary of
tokenizer.json and the rules of tokenizer_config.json. For its class without a model
(``PreTrainedTokenizerFast``), tokenizer.json decides. Without a class, both must agree.

Our WordPiece is the benchmark's, which differs from `transformers` here: the name of a special
token in a text is plain text, words of 101 to 200 characters are looked up, a capital sigma at the
end of a word becomes a final one, characters of private use are kept, and a few hundred rare
characters have a newer Unicode category.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from mlbert.data.formats.manifest import vocabulary_sha256
from mlbert.data.formats.wordpiece import (
    SPECIAL_TOKENS,
    UNKNOWN,
    TextRules,
    load_vocabulary,
    numbered,
)
from mlbert.host.errors import UserError
from mlbert.host.json_files import read_json, shown

VOCAB_FILE = "vocab.txt"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_ADDED_TOKENS = "added_tokens.json"
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
MODEL_CONFIG = "config.json"
# All files that a tokenizer is read from, next to the model's config.json.
TOKENIZER_FILES = (
    VOCAB_FILE,
    TOKENIZER_JSON,
    TOKENIZER_CONFIG,
    _ADDED_TOKENS,
    _SPECIAL_TOKENS_MAP,
)
VOCABULARY_SHA256 = "vocabulary_sha256"  # in the tokenizer_config.json that we write

# Classes with BERT's algorithm, without the suffix "Fast".
_BERT_CLASSES = (
    "BertTokenizer",
    "ConvBertTokenizer",
    "DistilBertTokenizer",
    "ElectraTokenizer",
    "LayoutLMTokenizer",
    "MobileBertTokenizer",
    "SqueezeBertTokenizer",
)
# Classes that take everything from tokenizer.json.
_GENERIC_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
_SPECIAL_NAMES = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
# The fields of `TextRules` in tokenizer_config.json, and in the normalizer of tokenizer.json.
RULE_NAMES = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
_NORMALIZER_NAMES = ("lowercase", "strip_accents", "handle_chinese_chars")
_ADDED_LISTS = ("additional_special_tokens", "extra_special_tokens")
# Keys of tokenizer_config.json that change ids, with the only value that is supported.
_ONLY_VALUES: Mapping[str, object] = {
    "add_bos_token": False,
    "add_eos_token": False,
    "clean_text": True,
    "do_basic_tokenize": True,
    "truncation_side": "right",
    "wordpieces_prefix": "##",
}
_ONLY_EMPTY = ("auto_map", "never_split")
# Of max_input_chars_per_word: that of `transformers`, and the benchmark's.
_WORD_LENGTHS = (100, 200)

_LONGEST = 60  # characters of a value in a message
_RESTORE = "Restore or remove the file"
_RESTORE_JSON = "Restore it, or put the vocab.txt next to it"
_OTHER = "Choose a model or vocabulary with BERT's usual tokenizer"


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files.

    Attributes:
        file: ``vocab.txt``, or ``tokenizer.json`` if there is no other.
        vocabulary: entry -> id.
        sha256: of the vocabulary as a vocab.txt.
        rules: for the text.
    """

    file: Path
    vocabulary: dict[str, int]
    sha256: str
    rules: TextRules


def find_vocabulary(folder: Path) -> Path:
    """Return the file with the vocabulary in a folder:
    vocab.txt, or tokenizer.json if only that exists.
    """
    plain = folder / VOCAB_FILE
    fast = folder / TOKENIZER_JSON
    return fast if fast.is_file() and not plain.exists() else plain


def read_tokenizer_files(file: Path) -> TokenizerFiles:
    """Read a vocabulary (vocab.txt, or any ``.json`` in the form of tokenizer.json)
    and the files next to it.

    Raises:
        UserError: a file is damaged, is not of a BERT vocabulary, contradicts another one, or has a
            property that changes ids and is not supported.
    """
    fast_file = file if file.suffix == ".json" else None
    if file.name == VOCAB_FILE and file.with_name(TOKENIZER_JSON).is_file():
        fast_file = file.with_name(TOKENIZER_JSON)
    fast = None if fast_file is None else _read_fast(fast_file)
    if file != fast_file:
        vocabulary = load_vocabulary(file)
        sha256 = vocabulary_sha256(file)
        if fast is not None and fast.vocabulary != vocabulary:
            reason = f"has other entries than {TOKENIZER_JSON}"
            remedy = "Keep only the one that the weights belong to"
            raise UserError("vocabulary.mismatch", file, reason, remedy)
    else:
        assert fast is not None
        vocabulary = fast.vocabulary
        sha256 = hashlib.sha256(vocabulary_text(vocabulary).encode()).hexdigest()
    config_file = file.with_name(TOKENIZER_CONFIG)
    config = read_json(config_file, _RESTORE) if config_file.exists() else {}
    if config.get(VOCABULARY_SHA256) not in (None, sha256):
        reason = f"is not the vocabulary whose {VOCABULARY_SHA256} is in {TOKENIZER_CONFIG}"
        remedy = "Restore it: the weights belong to its order"
        raise UserError("vocabulary.mismatch", file, reason, remedy)
    _check_config(config, config_file, vocabulary)
    _check_added_tokens(file, vocabulary)
    return TokenizerFiles(file, vocabulary, sha256, _choose_rules(config, config_file, fast))


def vocabulary_text(vocabulary: Mapping[str, int]) -> str:
    """Return the content of a vocab.txt: the entries in the order of their ids, one a line."""
    return "\n".join(sorted(vocabulary, key=vocabulary.__getitem__)) + "\n"


@dataclass(frozen=True)
class _Fast:
    """The content of a ``tokenizer.json``."""

    file: Path
    vocabulary: dict[str, int]
    rules: TextRules
    adds_special_tokens: bool  # around a text


def _read_fast(file: Path) -> _Fast:
    """Read a tokenizer.json. Raises UserError if it is damaged or not of BERT's WordPiece."""
    content = read_json(file, _RESTORE_JSON)
    model = content.get("model")
    if not isinstance(model, dict):
        reason = "holds no WordPiece vocabulary (no 'model')"
        raise UserError("vocabulary.format", file, reason, _RESTORE_JSON)
    if (kind := model.get("type", "WordPiece")) != "WordPiece":
        reason = f"is of a {shown(kind)} tokenizer"
        raise UserError("vocabulary.format", file, reason, "Choose a model with BERT's WordPiece")
    vocabulary = numbered(_entries(model.get("vocab"), file), file)
    _require(file, "model.unk_token", model.get("unk_token", UNKNOWN), (UNKNOWN,))
    prefix = model.get("continuing_subword_prefix", "##")
    _require(file, "model.continuing_subword_prefix", prefix, ("##",))
    length = model.get("max_input_chars_per_word", _WORD_LENGTHS[0])
    _require(file, "model.max_input_chars_per_word", length, _WORD_LENGTHS)
    normalizer = _part(content, "normalizer")
    _require(file, "normalizer", normalizer.get("type"), ("BertNormalizer",))
    _require(file, "normalizer.clean_text", normalizer.get("clean_text", True), (True,))
    splitter = _part(content, "pre_tokenizer")
    _require(file, "pre_tokenizer", splitter.get("type"), ("BertPreTokenizer",))
    for token in content.get("added_tokens") or ():
        if not isinstance(token, dict):
            raise UserError("vocabulary.format", file, "has no list of added_tokens", _RESTORE_JSON)
        _check_added(file, token.get("content"), token.get("id"), vocabulary)
    rules = _rules(
        normalizer.get("lowercase", True),
        normalizer.get("strip_accents"),
        normalizer.get("handle_chinese_chars", True),
        file,
        _NORMALIZER_NAMES,
    )
    template = content.get("post_processor")
    if template is not None and not _is_of_bert(template, vocabulary):
        kind = _part(content, "post_processor").get("type")
        reason = f"has a post_processor ({shown(kind)}) other than BERT's [CLS] A [SEP] B [SEP]"
        raise UserError("vocabulary.unsupported", file, reason, _OTHER)
    return _Fast(file, vocabulary, rules, template is not None)


def _entries(vocab: object, file: Path) -> list[str]:
    """Return the entries of a tokenizer.json in the order of their ids."""
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        reason = "holds no WordPiece vocabulary (no 'model.vocab' with a number for each entry)"
        raise UserError("vocabulary.format", file, reason, _RESTORE_JSON)
    entry_of = {number: entry for entry, number in vocab.items()}
    for number in range(len(vocab)):
        if number not in entry_of:
            reason = f"has {len(vocab)} entries, but none with the id {number}"
            raise UserError("vocabulary.format", file, reason, _RESTORE_JSON)
    entries = [entry_of[number] for number in range(len(vocab))]
    for number, entry in enumerate(entries):
        if "\n" in entry.strip() or "\r" in entry.strip() or not _is_text(entry):
            reason = f"has the entry {shown(entry)} (id {number}), which no vocab.txt can have"
            raise UserError("vocabulary.format", file, reason, _OTHER)
    return entries


def _is_text(entry: str) -> bool:
    """Return False for unpaired surrogates, which JSON can contain."""
    try:
        entry.encode()
    except UnicodeEncodeError:
        return False
    return True


def _part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object in a tokenizer.json, empty if it is null."""
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _require(file: Path, name: str, value: object, supported: Sequence[object]) -> None:
    if value not in supported:
        wanted = " or ".join(_written(one) for one in supported)
        reason = f"has {name} {_written(value)}; only {wanted} is supported"
        raise UserError("vocabulary.unsupported", file, reason, _OTHER)


def _written(value: object) -> str:
    """Return a value as in a JSON file, shortened if long."""
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _is_of_bert(template: object, vocabulary: Mapping[str, int]) -> bool:
    """Return whether a post_processor adds [CLS] and [SEP] as BERT does."""
    if not isinstance(template, dict):
        return False
    cls = vocabulary["[CLS]"]
    sep = vocabulary["[SEP]"]
    if template.get("type") == "BertProcessing":
        return template.get("cls") == ["[CLS]", cls] and template.get("sep") == ["[SEP]", sep]

    def special(token: str, segment: int) -> dict[str, object]:
        return {"SpecialToken": {"id": token, "type_id": segment}}

    def sequence(name: str, segment: int) -> dict[str, object]:
        return {"Sequence": {"id": name, "type_id": segment}}

    first = [special("[CLS]", 0), sequence("A", 0), special("[SEP]", 0)]
    second = [sequence("B", 1), special("[SEP]", 1)]
    tokens = template.get("special_tokens")
    return (
        template.get("type") == "TemplateProcessing"
        and template.get("single") == first
        and template.get("pair") == [*first, *second]
        and isinstance(tokens, dict)
        and all(
            isinstance(tokens.get(name), dict) and tokens[name].get("ids") == [number]
            for name, number in (("[CLS]", cls), ("[SEP]", sep))
        )
    )


def _rules(
    lower_case: object,
    strip_accents: object,
    split_cjk: object,
    file: Path,
    names: Sequence[str],
) -> TextRules:
    """Return the rules; ``names`` are those of the three values in the file.

    Raises UserError for a value that is not true or false;
    accents may also be null, which means as the case.
    """
    for name, value in zip(names, (lower_case, strip_accents, split_cjk), strict=True):
        if not isinstance(value, bool) and not (value is None and name == names[1]):
            reason = f"{name} is {shown(value)}, not true or false"
            raise UserError("config.value", file, reason, _RESTORE)
    is_lower = bool(lower_case)
    return TextRules(
        lower_case=is_lower,
        strip_accents=is_lower if strip_accents is None else bool(strip_accents),
        split_cjk=bool(split_cjk),
    )


def _choose_rules(config: Mapping[str, Any], config_file: Path, fast: _Fast | None) -> TextRules:
    """Return the rules of the file that decides, see this module's first lines."""
    configured = _rules(
        config.get("do_lower_case", True),
        config.get("strip_accents"),
        config.get("tokenize_chinese_chars", True),
        config_file,
        RULE_NAMES,
    )
    kind = config.get("tokenizer_class")
    kind_file = config_file
    model_file = config_file.with_name(MODEL_CONFIG)
    model = read_json(model_file, _RESTORE) if kind is None and model_file.is_file() else {}
    if kind is None:
        kind = model.get("tokenizer_class")
        kind_file = model_file
    name = None if kind is None else str(kind).removesuffix("Fast")
    if name is not None and name not in (*_BERT_CLASSES, *_GENERIC_CLASSES):
        reason = f"has tokenizer_class {shown(kind)}, which is not BERT's"
        raise UserError("vocabulary.unsupported", kind_file, reason, _OTHER)
    if fast is None or name in _BERT_CLASSES:
        return configured
    is_of_model = name is None and "model_type" in model
    if not fast.adds_special_tokens and not is_of_model:
        reason = "has no post_processor, so transformers adds no [CLS] and [SEP]"
        remedy = "Give its vocab.txt alone, or save it with BERT's post_processor"
        raise UserError("vocabulary.unsupported", fast.file, reason, remedy)
    if name is not None or (not is_of_model and not config.keys() & {*RULE_NAMES}):
        return fast.rules
    if configured != fast.rules:
        raise _contradiction(configured, config_file, fast)
    return configured


def _contradiction(configured: TextRules, config_file: Path, fast: _Fast) -> UserError:
    """Return the error for a tokenizer.json whose normalizer is not what tokenizer_config.json
    says.
    """
    pairs = zip(
        RULE_NAMES,
        _NORMALIZER_NAMES,
        astuple(configured),
        astuple(fast.rules),
        strict=True,
    )
    name, fast_name, value, fast_value = next(pair for pair in pairs if pair[2] != pair[3])
    reason = (
        f"has a normalizer with {fast_name} {_written(fast_value)}, "
        f"but {TOKENIZER_CONFIG} means {name} {_written(value)}"
    )
    remedy = f'Set "{name}": {_written(fast_value)} in {config_file}, or correct the normalizer'
    return UserError("vocabulary.mismatch", fast.file, reason, remedy)


def _check_config(config: Mapping[str, Any], file: Path, vocabulary: Mapping[str, int]) -> None:
    """Raise UserError if a tokenizer_config.json has a property that changes ids
    and is not supported.
    """
    for name, value in _ONLY_VALUES.items():
        if config.get(name) is not None:
            _require(file, name, config[name], (value,))
    for name in _ONLY_EMPTY:
        if config.get(name):
            reason = f"has {name} {_written(config[name])}, which is not supported"
            raise UserError("vocabulary.unsupported", file, reason, _OTHER)
    _check_special_tokens(config, file, vocabulary)
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise UserError("config.value", file, "added_tokens_decoder is not an object", _RESTORE)
    for number, token in decoder.items():
        is_id = number.isascii() and number.isdigit()
        _check_added(file, _content(token), int(number) if is_id else None, vocabulary)


def _check_special_tokens(
    values: Mapping[str, Any], file: Path, vocabulary: Mapping[str, int]
) -> None:
    """Raise UserError unless the special tokens are BERT's."""
    for name, value in values.items():
        if name.endswith("_token") and not isinstance(value, bool | None):
            content = _content(value)
            if name in _SPECIAL_NAMES:
                _require(file, name, content, (_SPECIAL_NAMES[name],))
            _check_added(file, content, None, vocabulary)
    for name in _ADDED_LISTS:
        for token in _members(values.get(name)):
            _check_added(file, _content(token), None, vocabulary)


def _content(token: object) -> object:
    """Return the text of a token, which is stored alone or with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _members(tokens: object) -> Iterator[object]:
    """Return the tokens of a list, or of an object that names them."""
    if isinstance(tokens, dict):
        yield from tokens.values()
    elif isinstance(tokens, list):
        yield from tokens


def _check_added_tokens(file: Path, vocabulary: Mapping[str, int]) -> None:
    """Raise UserError if a file next to a vocabulary has tokens other than BERT's."""
    added = file.with_name(_ADDED_TOKENS)
    if added.is_file():
        for token, number in read_json(added, _RESTORE).items():
            _check_added(added, token, number, vocabulary)
    special = file.with_name(_SPECIAL_TOKENS_MAP)
    if special.is_file():
        _check_special_tokens(read_json(special, _RESTORE), special, vocabulary)


def _check_added(file: Path, token: object, number: object, vocabulary: Mapping[str, int]) -> None:
    """Raise UserError for a token that is not one of BERT's special tokens with the vocabulary's id
    (None: any).
    """
    if token not in SPECIAL_TOKENS:
        reason = f"has the added token {shown(token)}, which is not supported"
        remedy = "Choose a model without added tokens, or remove them if the text has none"
        raise UserError("vocabulary.unsupported", file, reason, remedy)
    if number is not None and number != vocabulary[str(token)]:
        reason = f"gives {token} the id {shown(number)}, the vocabulary {vocabulary[str(token)]}"
        raise UserError("vocabulary.mismatch", file, reason, _RESTORE)
