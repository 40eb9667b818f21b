"""The chat template of a model's tokenizer, as token ids.

In: the model's folder. Out: `Template`: what stands before the words of an assistant and of a user, and the
token that ends a turn; None where the folder has no tokenizer, or its template cannot be taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from hsstream.errors import SampleError
from hsstream.estimate.model import load_tokenizer

WORDS = ("one", "two", "three")
#: Words for the one who asks, in what stands before a turn.
ASKING = ("user", "human", "prompter", "question", "instruction", "customer")


@dataclass(frozen=True)
class Template:
    """assistant, user: ids before their words; user may be empty; end: the id behind an assistant's words."""

    assistant: tuple[int, ...]
    user: tuple[int, ...]
    end: int


class Tokens:
    """A model's tokenizer, if it has one."""

    def __init__(self, model: str | None) -> None:
        self._model = model

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            return None if self._model is None else load_tokenizer(self._model)
        except SampleError:
            return None

    @cached_property
    def template(self) -> Template | None:
        """Its chat template."""
        tokenizer = self._tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            return None
        try:
            return _taken_apart(tokenizer)
        # Templates are programs that come with a model: they raise what they like.
        except Exception:  # noqa: BLE001
            return None

    def asks(self, ids: Sequence[int]) -> bool:
        """Whether these tokens, which stand before a turn, announce the one who asks."""
        if self._tokenizer is None:
            return False
        text = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False).lower()
        asked = max(text.rfind(word) for word in ASKING)
        return bool(asked > text.rfind("assistant"))


def _taken_apart(tokenizer: Any) -> Template | None:
    turns = [
        {"role": role, "content": words}
        for role, words in zip(("user", "assistant", "user"), WORDS, strict=True)
    ]

    def rendered(count: int, prompt: bool = False) -> list[int]:
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": prompt}
        return list(tokenizer.apply_chat_template(turns[:count], **options)["input_ids"])

    one, two, three = (tokenizer(words, add_special_tokens=False)["input_ids"] for words in WORDS)
    asked, answered, again = rendered(1), rendered(2), rendered(3)
    prompt = rendered(1, prompt=True)
    after = answered[len(asked) :]
    header = _common(prompt[len(asked) :], after)
    if not header:
        # Some templates have no header of their own: what ends the question begins the answer.
        header = asked[_find(asked, one) + len(one) :]
    said = _find(after, two)
    if answered[: len(asked)] != asked or not header or said < 0 or said + len(two) >= len(after):
        return None
    user: list[int] = []
    if again[: len(answered)] == answered and (place := _find(again[len(answered) :], three)) >= 0:
        user = again[len(answered) : len(answered) + place]
    return Template(tuple(header), tuple(user), after[said + len(two)])


def _common(first: Sequence[int], second: Sequence[int]) -> list[int]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return [one for one, _ in pairs]


def _find(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where `part` begins; -1: nowhere."""
    size = len(part)
    return next((at for at in range(len(ids) - size + 1) if list(ids[at : at + size]) == list(part)), -1)
