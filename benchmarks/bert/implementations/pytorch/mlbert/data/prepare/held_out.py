"""Choose the documents of a text that are held out: those with the smallest digests, so that
neither order nor number of files matters.
"""

from __future__ import annotations

import hashlib
import heapq

DIGEST_BITS = 64


def text_digest(text: str | bytes) -> int:
    """Return the first `DIGEST_BITS` bits of the SHA-256 of a text, or of its UTF-8."""
    encoded = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.sha256(encoded).digest()[: DIGEST_BITS // 8], "big")


class HeldOut:
    """The documents with the smallest digests, up to a total number of characters.

    Args:
        most: characters of all of them.
        least_documents: number of documents that must fit, so that no single one dominates what is
            measured on them: longer ones are not held out.
    """

    def __init__(self, most: int, least_documents: int) -> None:
        self._most = most
        self._longest = most // least_documents
        # (-digest, text): the largest digest is popped first
        self._heap: list[tuple[int, str]] = []
        self._known: set[int] = set()
        self.characters = 0

    def offer(self, digest: int, text: str) -> None:
        """Add the document, then drop others until all fit."""
        if len(text) > self._longest or digest in self._known:
            return
        heapq.heappush(self._heap, (-digest, text))
        self._known.add(digest)
        self.characters += len(text)
        self.shrink(self._most)

    def shrink(self, most: int) -> None:
        """Drop documents until at most this many characters are left."""
        while self.characters > most:
            digest, text = heapq.heappop(self._heap)
            self._known.discard(-digest)
            self.characters -= len(text)

    @property
    def texts(self) -> list[str]:
        """Texts in the order of their digests."""
        return [text for _, text in sorted(self._heap, reverse=True)]

    @property
    def digests(self) -> list[int]:
        """Digests of these texts, in the same order."""
        return [-digest for digest, _ in sorted(self._heap, reverse=True)]

    def __contains__(self, digest: int) -> bool:
        return digest in self._known
