"""Read the files of a tokenizer, as `transformers` and `tokenizers` write them.

A tokenizer is read from ``vocab.txt`` or ``tokenizer.json`` and from the files next to it. BERT's
plain WordPiece, a vocabulary and rules for the text before words are looked up, is run by our own
code. Any other property that changes token ids (added tokens, another normalizer, other special
tokens, another model) leaves it to the library `tokenizers`
(`mlbert.data.formats.library_tokenizer`). What neither can do is an error that names the file and
the property: ids that differ from those that a model was trained with would go unnoticed.

Which file decides: for BERT's tokenizer classes, `transformers` takes the vocabulary of
tokenizer.json and the rules of tokenizer_config.json. For every other class, and for ModernBERT,
tokenizer.json decides. Without a class, both must agree.

Our WordPiece is the benchmark's, which differs from `transformers` here: the name of a special
token in a text is plain text, words of 101 to 200 characters are looked up, a capital sigma at the
end of a word becomes a final one, characters of private use are kept, and a few hundred rare
characters have a newer Unicode category.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from mlbert.data.formats.library_tokenizer import (
    BERT_NAMES,
    add_tokens_of_files,
    bert_content,
    content_sha256,
    further_special_tokens,
    load_library,
    set_bert_template,
    token_content,
)
from mlbert.data.formats.manifest import MAX_VOCAB_SIZE, vocabulary_sha256
from mlbert.data.formats.special_tokens import Frame, SpecialTokens, find_special_tokens
from mlbert.data.formats.wordpiece import (
    SPECIAL_TOKENS,
    UNKNOWN,
    TextRules,
    check_entries,
    numbered,
    read_entries,
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
# Of these models transformers takes everything from tokenizer.json, whatever the class.
_GENERIC_MODELS = ("modernbert",)
# The fields of `TextRules` in tokenizer_config.json, and in the normalizer of tokenizer.json.
RULE_NAMES = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
_NORMALIZER_NAMES = ("lowercase", "strip_accents", "handle_chinese_chars")
# Keys of tokenizer_config.json that change ids, with the only value that is supported.
_ONLY_VALUES: Mapping[str, object] = {
    "add_bos_token": False,
    "add_eos_token": False,
    "clean_text": True,
    "do_basic_tokenize": True,
    "split_special_tokens": False,
    "truncation_side": "right",
    "wordpieces_prefix": "##",
}
_FOR_ALL = ("truncation_side", "split_special_tokens")  # of these, those that matter to every class
_ONLY_EMPTY = ("auto_map", "never_split")
# Files of transformers' older classes, from which tokenizer.json is made.
_OLD_FILES = ("vocab.json", "merges.txt")
# Of max_input_chars_per_word: that of `transformers`, and the benchmark's.
_WORD_LENGTHS = (100, 200)

_LONGEST = 60  # characters of a value in a message
_RESTORE = "Restore or remove the file"
_RESTORE_JSON = "Restore it, or put the vocab.txt next to it"
_OTHER = "Choose a model or vocabulary with BERT's usual tokenizer"
_GENERIC = 'Set "tokenizer_class": "PreTrainedTokenizerFast" in its tokenizer_config.json'
_SENTENCEPIECE = (".model", ".spm")  # suffixes of its files
_KEPT_TOKENIZERS = 4  # the largest take seconds to read


@dataclass(frozen=True)
class TokenizerFiles:
    """The content of a tokenizer's files.

    Attributes:
        file: ``vocab.txt``, or the ``tokenizer.json`` that is read.
        vocabulary: entry -> id, with the added tokens.
        sha256: of the vocabulary as a vocab.txt; of a tokenizer of the library, of all that changes
            its ids.
        rules: of BERT's plain WordPiece, for the text; None for every other tokenizer.
        special: its special tokens.
        library: runs a tokenizer without ``rules``.
    """

    file: Path
    vocabulary: dict[str, int]
    sha256: str
    rules: TextRules | None
    special: SpecialTokens
    library: tokenizers.Tokenizer | None = None


_Stamp = tuple[str, int, int]


@dataclass(frozen=True)
class _Files:
    """The files of the tokenizer of ``file``, a vocab.txt or tokenizer.json; each is read when it
    is first used.
    """

    file: Path

    @cached_property
    def fast_file(self) -> Path | None:
        """The tokenizer.json, or None."""
        return _fast_file(self.file)

    @property
    def config_file(self) -> Path:
        """The path of tokenizer_config.json."""
        return self.file.with_name(TOKENIZER_CONFIG)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of tokenizer_config.json, empty without one."""
        return read_json(self.config_file, _RESTORE) if self.config_file.exists() else {}

    @cached_property
    def kind(self) -> _Kind:
        """What `transformers` makes of the folder's tokenizer."""
        return _kind_of(self.config, self.config_file)

    @cached_property
    def content(self) -> dict[str, Any] | None:
        """Content of the tokenizer.json, or None."""
        return None if self.fast_file is None else read_json(self.fast_file, _RESTORE_JSON)

    def companion(self, name: str) -> dict[str, Any]:
        """Return the content of a file next to the vocabulary, empty without one."""
        path = self.file.with_name(name)
        return read_json(path, _RESTORE) if path.is_file() else {}


class _NotPlain(UserError):
    """A property that our WordPiece does not have; the library may have it."""


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
        UserError: a file is damaged or contradicts another one, or the tokenizer has a property
            that changes ids and is not supported.
    """
    if _fast_file(file) is None and not file.exists():
        _explain_missing(file)
    return _read_tokenizer(file, _stamps(file))


@lru_cache(_KEPT_TOKENIZERS)
def _read_tokenizer(file: Path, stamps: tuple[_Stamp, ...]) -> TokenizerFiles:
    """See `read_tokenizer_files`; ``stamps``, of all files, make a change another key."""
    del stamps
    files = _Files(file)
    try:
        return _read_plain(files)
    except _NotPlain as problem:
        found = _read_library(files)
        if found is None:
            raise problem from None
        return found


def _fast_file(file: Path) -> Path | None:
    """Return the tokenizer.json that a vocabulary is or has next to it, or None."""
    if file.suffix == ".json":
        return file
    neighbor = file.with_name(TOKENIZER_JSON)
    return neighbor if file.name == VOCAB_FILE and neighbor.is_file() else None


def _explain_missing(file: Path) -> None:
    """Raise UserError if a folder has a tokenizer in a form that is not read."""
    for other in sorted(file.parent.glob("*")):
        if other.suffix in _SENTENCEPIECE or other.name in _OLD_FILES:
            reason = f"is not a {TOKENIZER_JSON}, and there is none next to it"
            remedy = (
                "Write one with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
            raise UserError("vocabulary.format", other, reason, remedy)


def _stamps(file: Path) -> tuple[_Stamp, ...]:
    """Return the stamps of all files of a tokenizer."""
    companions = (*TOKENIZER_FILES, MODEL_CONFIG)
    return tuple(_stamp(path) for path in (file, *map(file.with_name, companions)))


def _stamp(path: Path) -> _Stamp:
    """Return path, time and size of a file, by which a changed one is noticed."""
    if not path.is_file():
        return str(path), -1, -1
    status = path.stat()
    return str(path), status.st_mtime_ns, status.st_size


def _read_plain(files: _Files) -> TokenizerFiles:
    """Read a tokenizer that our WordPiece can run. Raises _NotPlain if it cannot."""
    file = files.file
    config_file = files.config_file
    config = files.config
    _check_values(config, config_file, files.kind)
    fast = None
    if files.fast_file is not None and files.content is not None:
        fast = _read_fast(files.fast_file, files.content)
    if file != files.fast_file:
        vocabulary = read_entries(file)
        if fast is not None and fast.vocabulary != vocabulary:
            raise _other_entries(file)
        _check_special_entries(vocabulary, file, config)
        sha256 = vocabulary_sha256(file)
    else:
        assert fast is not None
        vocabulary = fast.vocabulary
        sha256 = hashlib.sha256(vocabulary_text(vocabulary).encode()).hexdigest()
    if config.get(VOCABULARY_SHA256) not in (None, sha256):
        reason = f"is not the vocabulary whose {VOCABULARY_SHA256} is in {TOKENIZER_CONFIG}"
        remedy = "Restore it: the weights belong to its order"
        raise UserError("vocabulary.mismatch", file, reason, remedy)
    _check_config(config, config_file, vocabulary)
    _check_added_tokens(files, vocabulary)
    rules = _choose_rules(config, files.kind, fast, config_file)
    return TokenizerFiles(file, vocabulary, sha256, rules, _plain_special_tokens(vocabulary))


def _other_entries(file: Path) -> UserError:
    reason = f"has different entries from {TOKENIZER_JSON}"
    remedy = "Keep only the one that the weights belong to"
    return UserError("vocabulary.mismatch", file, reason, remedy)


def _check_special_entries(
    vocabulary: Mapping[str, int], file: Path, config: Mapping[str, Any]
) -> None:
    """Raise UserError if a vocab.txt lacks a special token, _NotPlain if it has other ones or too
    many entries.
    """
    try:
        check_entries(vocabulary, file)
    except UserError as error:
        names = {token_content(config.get(name)) for name in BERT_NAMES}
        if len(vocabulary) > MAX_VOCAB_SIZE or names - {None, *SPECIAL_TOKENS}:
            raise _NotPlain(error.code, file, error.problem, error.remedy) from None
        raise


def _plain_special_tokens(vocabulary: Mapping[str, int]) -> SpecialTokens:
    sep = vocabulary["[SEP]"]
    return SpecialTokens(
        frame=Frame(first=vocabulary["[CLS]"], last=sep, between=(sep,), has_segments=True),
        mask="[MASK]",
        pad="[PAD]",
        unknown=UNKNOWN,
        ids=tuple(vocabulary[token] for token in SPECIAL_TOKENS),
    )


def _read_library(files: _Files) -> TokenizerFiles | None:
    """Read a tokenizer that the library runs; see `read_tokenizer_files`. Return None if there is
    nothing that it could run.
    """
    file = files.file
    config_file = files.config_file
    config = files.config
    kind = files.kind
    is_bert = kind.is_bert or (files.fast_file is None and kind.name is None)
    content = files.content
    if is_bert:
        given = {
            name: value
            for name, value in config.items()
            if value is not None or name not in BERT_NAMES
        }
        config = {**BERT_NAMES, **given}
        content = _bert_content(file, content, config, config_file)
    if content is None:
        return None
    main_file = files.fast_file or file
    library = load_library(content, main_file)
    names = add_tokens_of_files(
        library,
        config,
        files.companion(_SPECIAL_TOKENS_MAP),
        files.companion(_ADDED_TOKENS),
        (config_file, file.with_name(_ADDED_TOKENS)),
    )
    if is_bert:
        set_bert_template(library, names)
    return TokenizerFiles(
        file=main_file,
        vocabulary=library.get_vocab(with_added_tokens=True),
        sha256=content_sha256(library),
        rules=None,
        special=find_special_tokens(library, content["model"], names, main_file),
        library=library,
    )


def _bert_content(
    file: Path, content: Mapping[str, Any] | None, config: Mapping[str, Any], config_file: Path
) -> dict[str, Any]:
    """Return the content of the tokenizer.json that transformers makes for a class of BERT.

    Raises UserError if the tokenizer.json that exists is of another kind, which it ignores.
    """
    rules = _configured_rules(config, config_file)
    if content is None:
        return bert_content(read_entries(file), rules, config)
    json_file = file.with_name(TOKENIZER_JSON) if file.name == VOCAB_FILE else file
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    prefix = model.get("continuing_subword_prefix", "##") if isinstance(model, dict) else "##"
    if not isinstance(vocabulary, dict) or prefix != "##":
        reason = "is not the WordPiece tokenizer that its tokenizer_class implies"
        raise UserError("vocabulary.mismatch", json_file, reason, _GENERIC)
    if file != json_file and read_entries(file) != vocabulary:
        raise _other_entries(file)
    made = bert_content(vocabulary, rules, config)
    return {**made, "added_tokens": content.get("added_tokens") or []}


def is_plain(file: Path) -> bool:
    """Return whether our WordPiece runs a tokenizer; True for a damaged one, of which
    `read_tokenizer_files` says why it cannot be read.
    """
    return _is_plain(file, _stamps(file))


@lru_cache(_KEPT_TOKENIZERS)
def _is_plain(file: Path, stamps: tuple[_Stamp, ...]) -> bool:
    """See `is_plain`; ``stamps`` as of `_read_tokenizer`."""
    del stamps
    try:
        _read_plain(_Files(file))
    except _NotPlain:
        return False
    except UserError:
        return True
    return True


def copy_tokenizer_files(file: Path, folder: Path) -> None:
    """Copy the files of a tokenizer that the library runs to a folder, as they are.

    If no file there names the class, tokenizer_config.json gets it, and the special tokens, so that
    `transformers` reads the copy as it reads the original. Raises OSError.
    """
    files = _Files(file)
    fast_file = files.fast_file
    main_file = file if fast_file is None else fast_file
    shutil.copyfile(main_file, folder / (VOCAB_FILE if fast_file is None else TOKENIZER_JSON))
    for name in (TOKENIZER_CONFIG, _ADDED_TOKENS, _SPECIAL_TOKENS_MAP):
        if file.with_name(name).is_file():
            shutil.copyfile(file.with_name(name), folder / name)
    config = files.config
    kind = files.kind
    name = kind.name or _GENERIC_CLASSES[0]
    if kind.is_generic:
        name = _GENERIC_CLASSES[0]
    elif kind.is_bert or fast_file is None:
        name = _BERT_CLASSES[0]
    given = str(config.get("tokenizer_class")).removesuffix("Fast")
    if given == name or {given, name} <= {*_GENERIC_CLASSES}:
        return
    with contextlib.suppress(UserError):  # it may lack what only training needs
        found = read_tokenizer_files(file)
        config = {**found.special.names(found.vocabulary), **config}
    suffix = "Fast" if name in _GENERIC_CLASSES else ""
    values = {**config, "tokenizer_class": f"{name}{suffix}"}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


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


def _read_fast(file: Path, content: Mapping[str, Any]) -> _Fast:
    """Read the content of a tokenizer.json. Raises UserError if it is damaged, _NotPlain if it is
    not of BERT's plain WordPiece.
    """
    model = content.get("model")
    if not isinstance(model, dict):
        reason = "contains no tokenizer (no 'model')"
        raise UserError("vocabulary.format", file, reason, _RESTORE_JSON)
    if (kind := model.get("type", "WordPiece")) != "WordPiece":
        reason = f"belongs to a {shown(kind)} tokenizer"
        raise _NotPlain("vocabulary.unsupported", file, reason, _OTHER)
    try:
        vocabulary = numbered(_entries(model.get("vocab"), file), file)
    except UserError as error:
        raise _NotPlain(error.code, file, error.problem, error.remedy) from None
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
        raise _NotPlain("vocabulary.unsupported", file, reason, _OTHER)
    return _Fast(file, vocabulary, rules, template is not None)


def _entries(vocab: object, file: Path) -> list[str]:
    """Return the entries of a tokenizer.json in the order of their ids."""
    if not isinstance(vocab, dict) or not all(type(number) is int for number in vocab.values()):
        reason = "contains no WordPiece vocabulary (no 'model.vocab' with a number for each entry)"
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
        raise _NotPlain("vocabulary.unsupported", file, reason, _OTHER)


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


@dataclass(frozen=True)
class _Kind:
    """What `transformers` makes of a folder's tokenizer.

    Attributes:
        name: the class without the suffix "Fast", None if no file names it.
        written: as the file names it.
        model_type: of the config.json, None without one.
        file: where the class is named.
    """

    name: str | None
    written: object
    model_type: str | None
    file: Path

    @property
    def is_generic(self) -> bool:
        """Return True if the class or the model takes everything from tokenizer.json."""
        return self.name in _GENERIC_CLASSES or self.model_type in _GENERIC_MODELS

    @property
    def is_bert(self) -> bool:
        """Return True if the class makes BERT's tokenizer from a vocabulary."""
        if self.is_generic:
            return False
        return self.name in _BERT_CLASSES or (self.name is None and self.model_type == "bert")


def _kind_of(config: Mapping[str, Any], config_file: Path) -> _Kind:
    """Return the kind; ``config``: content of tokenizer_config.json."""
    model_file = config_file.with_name(MODEL_CONFIG)
    model = read_json(model_file, _RESTORE) if model_file.is_file() else {}
    kind = config.get("tokenizer_class")
    file = config_file
    if kind is None:
        kind = model.get("tokenizer_class")
        file = model_file
    name = None if kind is None else str(kind).removesuffix("Fast")
    model_type = model.get("model_type")
    return _Kind(name, kind, None if model_type is None else str(model_type), file)


def _configured_rules(config: Mapping[str, Any], config_file: Path) -> TextRules:
    return _rules(
        config.get("do_lower_case", True),
        config.get("strip_accents"),
        config.get("tokenize_chinese_chars", True),
        config_file,
        RULE_NAMES,
    )


def _choose_rules(
    config: Mapping[str, Any], kind: _Kind, fast: _Fast | None, config_file: Path
) -> TextRules:
    """Return the rules of the file that decides, see this module's first lines."""
    configured = _configured_rules(config, config_file)
    if not kind.is_generic and kind.name is not None and kind.name not in _BERT_CLASSES:
        reason = f"has tokenizer_class {shown(kind.written)}, which is not BERT's"
        raise _NotPlain("vocabulary.unsupported", kind.file, reason, _OTHER)
    if fast is None or (kind.name in _BERT_CLASSES and not kind.is_generic):
        return configured
    is_of_model = kind.name is None and kind.model_type is not None and not kind.is_generic
    if not fast.adds_special_tokens and not is_of_model:
        reason = "has no post_processor, so transformers adds no [CLS] and [SEP]"
        remedy = "Give its vocab.txt alone, or save it with BERT's post_processor"
        raise UserError("vocabulary.unsupported", fast.file, reason, remedy)
    if kind.is_generic or (not is_of_model and not config.keys() & {*RULE_NAMES}):
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


def _check_values(config: Mapping[str, Any], file: Path, kind: _Kind) -> None:
    """Raise UserError if a tokenizer_config.json has a value that neither our code nor the library
    supports.
    """
    for name, value in _ONLY_VALUES.items():
        is_without_class = kind.name is None and not kind.is_generic
        is_read = kind.is_bert or is_without_class or name in _FOR_ALL
        if is_read and config.get(name) not in (None, value):
            found = _written(config[name])
            reason = f"has {name} {found}; only {_written(value)} is supported"
            raise UserError("vocabulary.unsupported", file, reason, _OTHER)
    for name in _ONLY_EMPTY:
        if config.get(name):
            reason = f"has {name} {_written(config[name])}, which is not supported"
            raise UserError("vocabulary.unsupported", file, reason, _OTHER)


def _check_config(config: Mapping[str, Any], file: Path, vocabulary: Mapping[str, int]) -> None:
    """Raise _NotPlain if a tokenizer_config.json has other tokens than BERT's."""
    _check_special_tokens(config, file, vocabulary)
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise UserError("config.value", file, "added_tokens_decoder is not an object", _RESTORE)
    for number, token in decoder.items():
        is_id = number.isascii() and number.isdigit()
        _check_added(file, token_content(token), int(number) if is_id else None, vocabulary)


def _check_special_tokens(
    values: Mapping[str, Any], file: Path, vocabulary: Mapping[str, int]
) -> None:
    """Raise _NotPlain unless the special tokens are BERT's."""
    for name, value in values.items():
        if name.endswith("_token") and not isinstance(value, bool | None):
            content = token_content(value)
            if name in BERT_NAMES:
                _require(file, name, content, (BERT_NAMES[name],))
            _check_added(file, content, None, vocabulary)
    for token in further_special_tokens(values):
        _check_added(file, token_content(token), None, vocabulary)


def _check_added_tokens(files: _Files, vocabulary: Mapping[str, int]) -> None:
    """Raise _NotPlain if a file next to a vocabulary has tokens other than BERT's."""
    added = files.file.with_name(_ADDED_TOKENS)
    for token, number in files.companion(_ADDED_TOKENS).items():
        _check_added(added, token, number, vocabulary)
    special = files.file.with_name(_SPECIAL_TOKENS_MAP)
    _check_special_tokens(files.companion(_SPECIAL_TOKENS_MAP), special, vocabulary)


def _check_added(file: Path, token: object, number: object, vocabulary: Mapping[str, int]) -> None:
    """Raise _NotPlain for a token that is not one of BERT's special tokens, UserError for one that
    has not the vocabulary's id (None: any).
    """
    if token not in SPECIAL_TOKENS:
        reason = f"has the added token {shown(token)}, which is not supported"
        remedy = "Choose a model without added tokens, or remove them if the text has none"
        raise _NotPlain("vocabulary.unsupported", file, reason, remedy)
    if number is not None and number != vocabulary[str(token)]:
        reason = (
            f"gives {token} the id {shown(number)}, but the vocabulary has {vocabulary[str(token)]}"
        )
        raise UserError("vocabulary.mismatch", file, reason, _RESTORE)
