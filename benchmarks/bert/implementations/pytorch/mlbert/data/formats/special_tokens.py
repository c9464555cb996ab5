"""The special tokens of a tokenizer, found in its files.

The tokens around a text are those that the post-processor of tokenizer.json adds. The others are
named by tokenizer_config.json or special_tokens_map.json, or are the added tokens with a usual
name, such as [MASK] and <mask>.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from mlbert.host.errors import UserError

# Usual names, for a tokenizer.json without the files that name the tokens.
_USUAL: Mapping[str, Sequence[str]] = {
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
}
_PROBES = ("a", "e", "1", ".", "的", "و")  # texts, one of which every useful tokenizer knows
_FIRST = 0  # in `tokenizers.Encoding.sequence_ids`: a token of the first text
_SECOND = 1
_TEMPLATE_REMEDY = "Give it a post_processor such as [CLS] $A [SEP], and save it again"


@dataclass(frozen=True)
class Frame:
    """The special tokens around one text, and between two.

    Attributes:
        first, last: ids before and after a text.
        between: ids between the two texts of a pair, which is framed by the other two.
        has_segments: whether the second text is segment 1 in `transformers`.
    """

    first: int
    last: int
    between: tuple[int, ...]
    has_segments: bool


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a tokenizer; one that it does not have is None.

    Attributes:
        frame: tokens around texts.
        mask, pad, unknown: entries of the vocabulary.
        ids: of all special tokens: they are never masked, and never a random replacement.
    """

    frame: Frame
    mask: str | None
    pad: str | None
    unknown: str | None
    ids: tuple[int, ...]

    def names(self, vocabulary: Mapping[str, int]) -> dict[str, str]:
        """Return the tokens by their names in a tokenizer_config.json, without missing ones.

        ``vocabulary``: entry -> id.
        """
        entries = {number: entry for entry, number in vocabulary.items()}
        names = {
            "cls_token": entries[self.frame.first],
            "sep_token": entries[self.frame.last],
            "mask_token": self.mask,
            "pad_token": self.pad,
            "unk_token": self.unknown,
        }
        return {name: token for name, token in names.items() if token is not None}


def find_special_tokens(
    library: tokenizers.Tokenizer, model: Mapping[str, Any], names: Mapping[str, str], file: Path
) -> SpecialTokens:
    """Return the special tokens of a tokenizer.

    Args:
        library: the tokenizer.
        model: the part of that name in its tokenizer.json.
        names: token by its name in tokenizer_config.json, such as ``mask_token``.
        file: for messages.

    Raises:
        UserError: the tokenizer does not put one token of its vocabulary before and one after a
            text, or leaves out the second text of a pair.
    """
    added = library.get_added_tokens_decoder()
    contents = {token.content for token in added.values()}
    special = [number for number, token in added.items() if token.special]
    frame = _find_frame(library, file)
    found: dict[str, str | None] = {}
    for role, usual in _USUAL.items():
        named = names.get(f"{role}_token")
        found[role] = named or next((token for token in usual if token in contents), None)
    if found["unk"] is None:
        found["unk"] = _unknown_of_model(library, model)
    numbers = [library.token_to_id(token) for token in (*names.values(), *found.values()) if token]
    ids = {*special, frame.first, frame.last, *frame.between}
    ids |= {number for number in numbers if number is not None}
    return SpecialTokens(
        frame=frame,
        mask=found["mask"],
        pad=found["pad"],
        unknown=found["unk"],
        ids=tuple(sorted(ids)),
    )


def _unknown_of_model(library: tokenizers.Tokenizer, model: Mapping[str, Any]) -> str | None:
    """Return the entry that the model gives for what it does not know, or None."""
    number = model.get("unk_id")
    token = model.get("unk_token") if number is None else library.id_to_token(number)
    return token if token is not None and library.token_to_id(token) is not None else None


def _find_frame(library: tokenizers.Tokenizer, file: Path) -> Frame:
    known = (text for text in _PROBES if library.encode(text, add_special_tokens=False).ids)
    probe = next(known, _PROBES[0])
    single = library.encode(probe)
    places = [place for place, of in enumerate(single.sequence_ids) if of == _FIRST]
    before = places[0] if places else 0
    after = len(single.ids) - 1 - places[-1] if places else 0
    if (before, after) != (1, 1):
        reason = (
            f"puts {before} special tokens before a text and {after} after it, "
            "but a model needs one of each"
        )
        raise UserError("vocabulary.unsupported", file, reason, _TEMPLATE_REMEDY)
    pair = library.encode(probe, probe)
    if _SECOND not in pair.sequence_ids:
        remedy = "Give it a post_processor with both texts of a pair, and save it again"
        raise UserError(
            "vocabulary.unsupported", file, "leaves out the second text of a pair", remedy
        )
    for number in pair.ids:
        if library.id_to_token(number) is None:
            reason = f"has a post_processor with the id {number}, which is not in its vocabulary"
            raise UserError("vocabulary.mismatch", file, reason, _TEMPLATE_REMEDY)
    end_of_first = max(place for place, of in enumerate(pair.sequence_ids) if of == _FIRST) + 1
    second = pair.sequence_ids.index(_SECOND)
    return Frame(
        first=single.ids[0],
        last=single.ids[-1],
        between=tuple(pair.ids[end_of_first:second]),
        has_segments=pair.type_ids[second] == 1,
    )
