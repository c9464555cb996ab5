"""Read texts with one tag for each word, for example named entities.

.conll .bio .iob .txt    a word and its tag in a line, the first and the last of columns that white
                         space separates; an empty line after each text; lines that begin with
                         -DOCSTART- are left out, and before a text those that begin
                         with "# "; inside of a text, # is a word
.jsonl .json .parquet    one object a text, in one of the forms
                         {"words": ["Ada", "sings"], "tags": ["B-PER", "O"]}
                         {"text": "Ada sings", "spans": [{"start": 0, "end": 3, "label": "PER"}]}
                         {"text": "Ada sings", "words": [[0, 3], [4, 9]], "tags": ["B-PER", "O"]}

Columns may have the other names below. A span may also be a list [start, end, label]. Places are
counted in characters. Words of a text with spans are those of BERT's tokenizer: white space
separates them, and punctuation and ideographs are words by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from mlbert.data.formats.entities import Entity, tags_of
from mlbert.data.formats.manifest import file_sha256
from mlbert.data.formats.tasks import (
    OBJECT_SUFFIXES,
    TaskForm,
    TaskRows,
    read_evaluation,
    read_objects,
    read_training,
    suffix_of,
    text_of_file,
)
from mlbert.data.formats.wordpiece import is_cjk, is_punctuation
from mlbert.host.errors import UserError, nearest
from mlbert.host.json_files import shown, whole_characters

CONLL_SUFFIXES = (".conll", ".bio", ".iob", ".iob2")
TABLE_SUFFIX = ".csv"  # of no form; .tsv may be lines with a word and its tag
WORD_NAMES = ("words", "tokens")
TAG_NAMES = ("tags", "ner_tags", "pos_tags", "labels")
SPAN_NAMES = ("spans", "entities", "label", "labels")
TEXT_NAME = "text"
_COMMENT = "# "
_REMEDY = "Fix the row"
_FORMS = 'Write {"words": [...], "tags": [...]} or {"text": "...", "spans": [...]}'


@dataclass(frozen=True)
class TaggedText:
    """A text: its words, each with the white space before it, and their tags, if any."""

    line: int
    words: list[str]
    tags: list[str] | None


def is_tagged(path: Path) -> bool:
    """Return whether a file has one of these forms, judged by its suffix and its first object.

    Raises UserError if it cannot be read.
    """
    if suffix_of(path) in CONLL_SUFFIXES:
        return True
    if suffix_of(path) not in OBJECT_SUFFIXES:
        return False
    for _, values in read_objects(path):
        if isinstance(_first(values, WORD_NAMES), list):
            return isinstance(_first(values, TAG_NAMES), list)
        spans = _first(values, SPAN_NAMES)
        if isinstance(spans, list) and spans:
            return isinstance(spans[0], dict | list) and isinstance(values.get(TEXT_NAME), str)
    return False


def split_words(text: str, cuts: Iterable[int] = ()) -> list[str]:
    """Return the words of a text, each with the white space before it.

    ``cuts``: places in the text, counted in characters, where a word ends in any case.
    """
    borders = set(cuts)
    words: list[str] = []
    begins_word = True
    space = ""
    for place, char in enumerate(text):
        if char.isspace():
            space += char
            begins_word = True
            continue
        is_alone = is_cjk(char) or is_punctuation(char)
        if begins_word or is_alone or place in borders:
            words.append(space + char)
        else:
            words[-1] += char
        space = ""
        begins_word = is_alone
    return words


def word_places(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return the first character of each word, without the white space, and the one after it."""
    places = []
    end = 0
    for word in words:
        end += len(word)
        places.append((end - len(word.lstrip()), end))
    return places


def read_tagged(path: Path, classes: Sequence[str] | None, skip_bad: bool) -> TaskRows:
    """Read texts with tags.

    Args:
        path: the file.
        classes: the tags of the task; None takes those of the file.
        skip_bad: leave out texts whose words or tags are missing.

    Raises:
        UserError: the file is missing, damaged or empty, texts have no tags, or a tag is not one
            of the task's.
    """
    texts, left_out = _complete(path, list(_texts(path)), skip_bad)
    known = tuple(classes) if classes is not None else _classes(path, texts)
    numbers = {tag: number for number, tag in enumerate(known)}
    label_lists = []
    for text in texts:
        for tag in text.tags or ():
            if tag not in numbers:
                guess = nearest(tag, known)
                remedy = f"Did you mean {guess}?" if guess else "Fix it, or add rows to train on"
                reason = f"line {text.line}: {tag!r} is not a tag of the task"
                raise UserError("data.labels", path, reason, remedy)
        label_lists.append([numbers[tag] for tag in text.tags or ()])
    warnings = (f"warning: {path}: {left_out:,} texts are left out",) if left_out else ()
    return replace(_rows(path, texts, known, label_lists, warnings), left_out=left_out)


def read_task(path: Path, form: TaskForm, classes: tuple[str, ...] | None = None) -> TaskRows:
    """Read a task's file of any kind; the training file, for which ``classes`` is None, defines the
    classes.

    Raises UserError as `read_tagged`, `read_training` and `read_evaluation`.
    """
    if form.kind == "tags":
        return read_tagged(path, classes, form.skip_bad)
    if classes is None:
        return read_training(path, form)
    return read_evaluation(path, form, classes)


def read_untagged(path: Path, form: TaskForm) -> TaskRows:
    """Read texts whose tags are to be predicted; tags in the file are ignored.

    Raises UserError as `read_tagged`.
    """
    texts = [text for text in _texts(path, with_tags=False) if text.words]
    if not texts:
        raise UserError(
            "data.empty", path, "contains no words", "Give a file with at least one text"
        )
    return _rows(path, texts, form.classes or (), None, ())


def write_tagged(path: Path, rows: TaskRows, chosen: Sequence[int]) -> None:
    """Write these rows as JSON lines with text, places of the words, and tags. Raises OSError."""
    assert rows.words is not None
    assert rows.label_lists is not None
    with path.open("w", encoding="utf-8") as file:
        for row in chosen:
            words = rows.words[row]
            line = {
                TEXT_NAME: "".join(words),
                WORD_NAMES[0]: word_places(words),
                TAG_NAMES[0]: [rows.classes[number] for number in rows.label_lists[row]],
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _rows(
    path: Path,
    texts: Sequence[TaggedText],
    classes: tuple[str, ...],
    label_lists: list[list[int]] | None,
    warnings: tuple[str, ...],
) -> TaskRows:
    return TaskRows(
        path=path,
        texts=(["".join(text.words) for text in texts],),
        labels=None,
        classes=classes,
        identity=f"sha256:{file_sha256(path)}",
        warnings=warnings,
        lines=tuple(text.line for text in texts),
        label_lists=label_lists,
        words=[text.words for text in texts],
    )


def _complete(
    path: Path, texts: Sequence[TaggedText], skip_bad: bool
) -> tuple[list[TaggedText], int]:
    """Return the texts with tags, and how many were left out."""
    good = [text for text in texts if text.tags and text.words]
    bad = [text.line for text in texts if not (text.tags and text.words)]
    if not good:
        raise UserError("data.empty", path, "contains no words with tags", _FORMS)
    if bad and not skip_bad:
        lines = ", ".join(map(str, bad[:10]))
        more = f" and {len(bad) - 10:,} more" if len(bad) > 10 else ""
        reason = f"texts without words or tags: line {lines}{more}"
        raise UserError(
            "data.row", path, reason, "Give each tags, or leave them out with SKIP_BAD=1"
        )
    return good, len(bad)


def _classes(path: Path, texts: Sequence[TaggedText]) -> tuple[str, ...]:
    found = tuple(sorted({tag for text in texts for tag in text.tags or ()}))
    if len(found) == 1:
        reason = f"every word has the tag {found[0]!r}"
        raise UserError("data.labels", path, reason, "Give words with at least two tags")
    # "O" first, so that it is the class of a word that an untrained model does not know.
    return tuple(sorted(found, key=lambda tag: (tag != "O", tag)))


def _texts(path: Path, with_tags: bool = True) -> Iterator[TaggedText]:
    if suffix_of(path) == TABLE_SUFFIX:
        reason = "is a table, which has no tag for each word"
        remedy = "Give .jsonl with a text on each line, or .conll with a word on each line"
        raise UserError("file.wrong-kind", path, reason, remedy)
    if suffix_of(path) in OBJECT_SUFFIXES:
        yield from _texts_of_objects(path, with_tags)
    else:
        yield from _texts_of_lines(path, with_tags)


def _texts_of_lines(path: Path, with_tags: bool) -> Iterator[TaggedText]:
    words: list[str] = []
    tags: list[str] = []
    begins = 1
    for number, line in enumerate([*text_of_file(path).split("\n"), ""], 1):
        columns = line.split()
        is_comment = not words and line.startswith(_COMMENT)
        if is_comment or line.startswith("-DOCSTART-"):
            columns = []
        if not columns:
            if words:
                yield TaggedText(begins, words, tags if with_tags else None)
            words = []
            tags = []
            continue
        if with_tags and len(columns) == 1:
            reason = f"line {number} has one column, where a word and its tag were expected"
            raise UserError("data.row", path, reason, "Write a word and its tag, as Paris B-LOC")
        if not words:
            begins = number
        words.append(f" {columns[0]}" if words else columns[0])
        tags.append(columns[-1])


def _texts_of_objects(path: Path, with_tags: bool) -> Iterator[TaggedText]:
    for line, values in read_objects(path):
        words = _first(values, WORD_NAMES)
        text = values.get(TEXT_NAME)
        if isinstance(text, str):
            text = whole_characters(text)
        if isinstance(words, list):
            found_words = _words_of_list(path, line, words, text)
            tags = _first(values, TAG_NAMES)
            if with_tags and tags is not None and len(_list(path, line, tags)) != len(words):
                reason = (
                    f"line {line} has {len(words)} words and {len(_list(path, line, tags))} tags"
                )
                raise UserError("data.row", path, reason, _REMEDY)
            found_tags = None
            if with_tags and isinstance(tags, list):
                found_tags = [_tag(path, line, tag) for tag in tags]
            yield TaggedText(line, found_words, found_tags)
        elif isinstance(text, str):
            spans = _first(values, SPAN_NAMES) if with_tags else None
            if spans is None:
                yield TaggedText(line, split_words(text), None)
            else:
                yield _text_with_spans(path, line, text, _list(path, line, spans))
        else:
            raise UserError("data.columns", path, f"line {line} has no words and no text", _FORMS)


def _words_of_list(path: Path, line: int, words: list[object], text: object) -> list[str]:
    if all(isinstance(word, str) for word in words):
        texts = [whole_characters(str(word)) for word in words]
        return [f" {word}" if number else word for number, word in enumerate(texts)]
    ends = _ends(words, text) if isinstance(text, str) else None
    if ends is None:
        reason = f"line {line}: words is {shown(words)}, not words or positions in the text"
        raise UserError("data.row", path, reason, _REMEDY)
    return [str(text)[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _ends(words: Sequence[object], text: str) -> list[int] | None:
    """Return where each word ends; None unless all are places in the text, one after the other,
    with a word in each.
    """
    ends: list[int] = []
    for place in words:
        if not isinstance(place, list) or len(place) != 2:
            return None
        start, end = place
        if type(start) is not int or type(end) is not int:
            return None
        before = ends[-1] if ends else 0
        if not before <= start < end <= len(text) or not text[start:end].strip():
            return None
        ends.append(end)
    return ends


def _tag(path: Path, line: int, tag: object) -> str:
    """Return a tag, a text or a number. Raises UserError for another value."""
    if isinstance(tag, str) and tag:
        return whole_characters(tag)
    if type(tag) is int:
        return str(tag)
    raise UserError("data.row", path, f"line {line}: {shown(tag)} is not a tag", _REMEDY)


def _text_with_spans(path: Path, line: int, text: str, spans: list[object]) -> TaggedText:
    found = sorted(_span(path, line, span, text) for span in spans)
    for (_, end, _), (start, after, _) in pairwise(found):
        if start < end:
            reason = f"line {line}: the spans to {end} and {start}:{after} overlap"
            raise UserError("data.row", path, reason, "Keep one of them")
    words = split_words(text, [place for start, end, _ in found for place in (start, end)])
    places = word_places(words)
    entities = []
    for start, end, label in found:
        inside = [n for n, (first, last) in enumerate(places) if first >= start and last <= end]
        if not inside:
            reason = f"line {line}: the span {start}:{end} has no word"
            raise UserError("data.row", path, reason, _REMEDY)
        entities.append(Entity(label, inside[0], inside[-1] + 1))
    return TaggedText(line, words, tags_of(entities, len(words)))


def _span(path: Path, line: int, span: object, text: str) -> tuple[int, int, str]:
    try:
        if isinstance(span, dict):
            start = span["start"]
            end = span["end"]
            label = span.get("label", span.get("entity_group"))
        else:
            start, end, label = span  # type: ignore[misc]
        if isinstance(start, int) and isinstance(end, int) and isinstance(label, str) and label:
            if 0 <= start < end <= len(text):
                return start, end, whole_characters(label)
            reason = f"line {line}: the span {start}:{end} is outside of the text"
            raise UserError("data.row", path, reason, "Count characters from 0")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
    reason = f"line {line}: {shown(span)} is not a span"
    remedy = 'Write {"start": 0, "end": 3, "label": "PER"}'
    raise UserError("data.row", path, reason, remedy)


def _first(values: dict[str, object], names: Sequence[str]) -> object:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _list(path: Path, line: int, value: object) -> list[object]:
    if not isinstance(value, list):
        raise UserError("data.row", path, f"line {line}: {shown(value)} is not a list", _REMEDY)
    return value
