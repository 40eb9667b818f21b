"""Documents in; keyed samples of token ids and loss mask out.

A text is cut into consecutive pieces of at most `max_length` tokens and every token is supervised. A
conversation is one sample, truncated to `max_length`, and its assistant turns are supervised. The key
is made from the origin, the piece and the tokens themselves: the same source gives the same keys, and
another length limit or tokenizer gives other ones, so that a resumed run never mixes two cuts.
Dropped, counted: documents without a token, conversations without a supervised token.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from extraction.errors import SourceError
from extraction.masks import tokenize_chat
from extraction.source import Document, SourceFile, read_documents

#: What is said of documents and samples that were left out or cut.
_TOLD = {
    "bad": "{:,} documents left out: they cannot be used (listed above)",
    "empty": "{:,} documents left out: no tokens",
    "nonfinite": "{:,} samples left out: NaN or Inf in their states",
    "truncated": "{:,} conversations truncated to --max-length",
    "unanswered": "{:,} conversations left out: no assistant turn (--loss-mask all supervises every token)",
    "unsupervised": "{:,} conversations left out: no supervised token within --max-length",
}


def told(dropped: Mapping[str, int]) -> list[str]:
    """A line for each reason, with its count."""
    return [_TOLD[reason].format(count) for reason, count in sorted(dropped.items()) if count]


@dataclass(frozen=True)
class TokenSample:
    """One sample before its forward pass: `ids` int32 [S], `mask` uint8 [S]."""

    key: str
    ids: np.ndarray[Any, np.dtype[np.int32]]
    mask: np.ndarray[Any, np.dtype[np.uint8]]
    meta: dict[str, Any]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Tokenizing:
    """How documents become samples, with the counts of what was read and dropped."""

    tokenizer: Any
    max_length: int
    loss: str = "assistant"
    on_bad: str = "raise"
    text_field: str = "text"
    documents: int = 0
    read_bytes: int = 0
    read_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    report: Callable[[str], None] = lambda _line: None

    def samples(self, files: Iterable[SourceFile]) -> Iterator[TokenSample]:
        """Every sample of every file, in order; bad documents stop the run or are counted."""
        for file in files:
            for document in read_documents(file, self.text_field):
                self.documents += 1
                yield from self._checked(document)

    def _checked(self, document: Document | SourceError) -> list[TokenSample]:
        try:
            if isinstance(document, SourceError):
                raise document
            return self._cut(document)
        except SourceError as error:
            if self.on_bad == "raise":
                raise SourceError(
                    f"{error}: fix it, or leave such documents out with --on-bad skip"
                ) from error
            self.dropped["bad"] += 1
            self.report(f"skipped: {error}")
            return []

    def _cut(self, document: Document) -> list[TokenSample]:
        cut = self._cut_chat if document.messages is not None else self._cut_text
        samples = cut(document)
        self.read_bytes += document.size
        self.read_tokens += sum(map(len, samples))
        return samples

    def _cut_chat(self, document: Document) -> list[TokenSample]:
        messages = document.messages or []
        ids, mask = tokenize_chat(self.tokenizer, messages, document.origin, document.tools)
        if self.loss == "all":
            mask = [True] * len(ids)
        self.dropped["truncated"] += len(ids) > self.max_length
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not any(mask):
            answered = any(message.get("role") == "assistant" for message in messages)
            self.dropped["unsupervised" if answered else "unanswered"] += 1
            return []
        return [_sample(document.origin, 0, ids, mask)]

    def _cut_text(self, document: Document) -> list[TokenSample]:
        ids = list(self.tokenizer(document.text).input_ids)
        head = ids[:1] if ids and ids[0] == self.tokenizer.bos_token_id else []
        body, step = ids[len(head) :], self.max_length - len(head)
        if not body:
            self.dropped["empty"] += 1
        pieces = [head + body[at : at + step] for at in range(0, len(body), step)]
        return [_sample(document.origin, n, piece, [True] * len(piece)) for n, piece in enumerate(pieces)]


def _sample(origin: str, piece: int, ids: list[int], mask: list[bool]) -> TokenSample:
    ids_S, mask_S = np.array(ids, dtype=np.int32), np.array(mask, dtype=np.uint8)
    meta: dict[str, Any] = {"source": origin} | ({"piece": piece} if piece else {})
    return TokenSample(sample_key(origin, piece, ids_S.tobytes(), mask_S.tobytes()), ids_S, mask_S, meta)


def sample_key(origin: str, piece: int, *parts: bytes) -> str:
    """A readable, unique, stable key: the tail of the origin, the piece, a digest of everything."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (origin.encode(), str(piece).encode(), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    slug = re.sub(r"[^A-Za-z0-9]+", "-", origin)[-28:].strip("-") or "sample"
    return f"{slug}-{piece}-{digest.hexdigest()}"
