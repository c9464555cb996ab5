"""Tokenizers of any kind, as the library `tokenizers` runs them.

A ``tokenizer.json`` is loaded as it is. What the files next to it add is then applied, as
`transformers` does: added tokens, and special tokens that are named and were not added. For the
classes of BERT, `transformers` takes the vocabulary of tokenizer.json alone, and makes the rest by
the class and tokenizer_config.json (`bert_content`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from mlbert.data.formats.wordpiece import TextRules
from mlbert.host.errors import UserError
from mlbert.host.json_files import shown, whole_characters

_REMEDY = "Restore the file, or save the tokenizer again with transformers"
# The parts of a tokenizer.json that do not change the ids of a text.
_NOT_OF_IDS = ("version", "truncation", "padding", "decoder")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
# Lists of further special tokens in tokenizer_config.json.
_LISTS = ("additional_special_tokens", "extra_special_tokens")
# The special tokens in the order in which transformers adds them.
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# What the classes of BERT call them unless tokenizer_config.json does.
BERT_NAMES: Mapping[str, str] = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
_LARGE = ("vocab", "merges")  # of a model: not searched for empty values


def load_library(content: Mapping[str, Any], file: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json's content; ``file`` is for messages.

    Raises UserError if the library cannot read it.
    """
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises this class itself
        what, _, _ = str(error).partition(" at line ")  # of the copy that it got
        reason = f"cannot be read by the library tokenizers ({what})"
        raise UserError("vocabulary.format", file, reason, _REMEDY) from None
    library.no_truncation()
    library.no_padding()
    return library


def add_tokens_of_files(
    library: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    special_map: Mapping[str, Any],
    added: Mapping[str, Any],
    files: tuple[Path, Path],
) -> dict[str, str]:
    """Add the tokens of the files next to a tokenizer.json; return the named special tokens.

    Args:
        library: the tokenizer, which is changed.
        config: content of tokenizer_config.json.
        special_map: content of special_tokens_map.json.
        added: content of added_tokens.json: token -> id.
        files: tokenizer_config.json and added_tokens.json, for messages.

    Raises:
        UserError: a token has another id in the tokenizer than in its file.
    """
    config_file, added_file = files
    # transformers reads the older files only if tokenizer_config.json does not have the tokens.
    is_listed = "added_tokens_decoder" in config
    named = dict(config) if is_listed else {**config, **special_map}
    if is_listed:
        listed = [
            (number, _token(values, config_file))
            for number, values in _listed_tokens(config, config_file)
        ]
        _add(library, listed, config_file)
    else:
        special = [token_content(value) for value in _special_values(named)]
        listed = []
        for number, content in _added_tokens(added, added_file):
            is_special = content in special
            properties = {"content": content, "normalized": not is_special, "special": is_special}
            listed.append((number, _token(properties, added_file)))
        _add(library, listed, added_file)
    known = {token.content for token in library.get_added_tokens_decoder().values()}
    missing = []
    for value in _special_values(named):
        text = token_content(value)
        if isinstance(text, str) and text and text not in known:
            properties = value if isinstance(value, dict) else {"content": text}
            missing.append(_token({**properties, "special": True}, config_file))
            known.add(text)
    library.add_tokens(missing)
    return {
        name: str(token_content(value))
        for name, value in named.items()
        if name.endswith("_token") and isinstance(token_content(value), str)
    }


def bert_content(vocabulary: Mapping[str, int], rules: TextRules, config: Mapping[str, Any]) -> Any:
    """Return the content of a tokenizer.json that `transformers` makes for its classes of BERT,
    without added tokens and template.

    Args:
        vocabulary: entry -> id.
        rules: for the text.
        config: content of tokenizer_config.json, with `BERT_NAMES`.
    """
    unknown = str(token_content(config["unk_token"]))
    made = tokenizers.Tokenizer(models.WordPiece(dict(vocabulary), unk_token=unknown))
    made.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=rules.split_cjk,
        strip_accents=rules.strip_accents,
        lowercase=rules.lower_case,
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##")
    return json.loads(made.to_str())


def set_bert_template(library: tokenizers.Tokenizer, names: Mapping[str, str]) -> None:
    """Make a tokenizer frame texts as `transformers` does for its classes of BERT.

    ``names``: as of `add_tokens_of_files`.
    """
    cls = names["cls_token"]
    sep = names["sep_token"]
    library.post_processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(token, library.token_to_id(token)) for token in (cls, sep)],
    )


def content_sha256(library: tokenizers.Tokenizer) -> str:
    """Return a digest of all that changes ids. A value that is empty or false counts as missing, so
    that an option of a later version of the library changes nothing.
    """
    content = json.loads(library.to_str())
    parts = {name: value for name, value in content.items() if name not in _NOT_OF_IDS}
    text = json.dumps(_without_empty(parts), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _without_empty(value: object) -> object:
    if isinstance(value, dict):
        return {
            name: one if name in _LARGE else _without_empty(one)
            for name, one in value.items()
            if one is not None and one is not False and one not in ("", [], {})
        }
    if isinstance(value, list):
        return [_without_empty(one) for one in value]
    return value


def _listed_tokens(config: Mapping[str, Any], file: Path) -> list[tuple[int, Any]]:
    decoder = config["added_tokens_decoder"] or {}
    if not isinstance(decoder, dict) or not all(number.isdecimal() for number in decoder):
        raise UserError("config.value", file, "added_tokens_decoder is not an object", _REMEDY)
    return sorted((int(number), values) for number, values in decoder.items())


def _added_tokens(added: Mapping[str, Any], file: Path) -> list[tuple[int, str]]:
    """Return the tokens of an added_tokens.json in the order of their ids, in which they are
    added.
    """
    for content, number in added.items():
        if not content or type(number) is not int:
            reason = f"gives {shown(content)} the id {shown(number)}"
            raise UserError("config.value", file, reason, _REMEDY)
    return sorted((number, content) for content, number in added.items())


def _token(values: object, file: Path) -> AddedToken:
    content = token_content(values)
    is_text = isinstance(content, str) and whole_characters(content) == content
    if not isinstance(values, dict) or not content or not is_text:
        raise UserError("config.value", file, f"has the added token {shown(values)}", _REMEDY)
    flags = {name: bool(values[name]) for name in _FLAGS if values.get(name) is not None}
    return AddedToken(str(content), **flags)


def _add(
    library: tokenizers.Tokenizer, listed: Sequence[tuple[int, AddedToken]], file: Path
) -> None:
    """Add tokens in one call: each call takes the time of all tokens that are there.

    Raises UserError if a token does not get the id that is listed.
    """
    known = library.get_added_tokens_decoder()
    library.add_tokens(
        [
            token
            for number, token in listed
            if number not in known or repr(known[number]) != repr(token)
        ]
    )
    for number, token in listed:
        found = library.token_to_id(token.content)
        if found != number:
            reason = f"gives {token.content} the id {shown(number)}, but the vocabulary has {found}"
            raise UserError("vocabulary.mismatch", file, reason, _REMEDY)


def _special_values(values: Mapping[str, Any]) -> Iterator[object]:
    """Yield the special tokens in a tokenizer_config.json, each a text or its properties."""
    first = [f"{role}_token" for role in _NAMED]
    others = [name for name in values if name.endswith("_token") and name not in first]
    for name in (*first, *others):
        if isinstance(token_content(values.get(name)), str):
            yield values[name]
    yield from further_special_tokens(values)


def further_special_tokens(values: Mapping[str, Any]) -> Iterator[object]:
    """Yield the tokens of `_LISTS`, which may also be objects that name them."""
    for name in _LISTS:
        tokens = values.get(name)
        if isinstance(tokens, dict):
            yield from tokens.values()
        elif isinstance(tokens, list):
            yield from tokens


def token_content(token: object) -> object:
    """Return the text of a token, which is stored alone or with its properties."""
    return token.get("content") if isinstance(token, dict) else token
