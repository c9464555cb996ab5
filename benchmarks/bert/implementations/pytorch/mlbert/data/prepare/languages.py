"""Name the language of documents with the library py3langid, which brings its model."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from mlbert.host.errors import import_package

EVERY = 10  # one document of so many is named, which costs half a millisecond
LEAST_CONFIDENCE = 0.5  # of the library, with which a language is named
UNSURE = "unsure"  # also what is no language
LEAST_SHARE = 0.01  # of the documents, from which a language is shown
_NO_LANGUAGE = ("und", "zxx")
_PACKAGE = "py3langid.langid"


@cache
def _identifier() -> Any:
    """Return the library's model, 100 MB of memory.

    Raises UserError if the library is not installed.
    """
    library = import_package(_PACKAGE, "--languages", "languages")
    return library.LanguageIdentifier.from_model_file(
        library.MODEL_FILE, norm_probs=True, min_confidence=LEAST_CONFIDENCE
    )


def check_languages() -> None:
    """Raise UserError if the library is not installed."""
    import_package(_PACKAGE, "--languages", "languages")


def load_languages() -> None:
    """Load the model, which processes forked afterwards share.

    Raises UserError as `check_languages`.
    """
    _identifier()


def is_named(digest: int) -> bool:
    """Return whether a document is among those whose language is named, by its digest."""
    return digest % EVERY == 0


def language_of(text: str) -> str:
    """Return the ISO 639 code of the language of a text, such as ``de``, or `UNSURE`."""
    language, _ = _identifier().classify(text)
    return UNSURE if language in _NO_LANGUAGE else str(language)


def language_words(languages: Counter[str]) -> str:
    """Return the languages of at least `LEAST_SHARE` of the documents, as ``97% de, 3% en``."""
    total = languages.total()
    return ", ".join(
        f"{count / total:.0%} {name}"
        for name, count in languages.most_common()
        if count >= LEAST_SHARE * total
    )
