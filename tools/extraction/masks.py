"""A conversation in; its token ids and loss mask (the assistant's tokens) out.

Three rules, tried in this order:

1. the template marks assistant spans itself with `{% generation %}`;
2. growing prefixes: the tokens of the conversation up to and including a turn must be a prefix of the
   tokens of the whole; a span runs from the end of the prompt to the end of the turn;
3. the turn's content is looked up in the rendered text, for templates that rewrite earlier turns
   (those that drop the reasoning of all but the last answer).

A span ends with its end-of-turn token; what the template puts after that is not the model's to say.
Refused: a tokenizer without a chat template, conversations the template rejects, and conversations
that none of the rules can place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from extraction.errors import ExtractError, SourceError

Messages = list[dict[str, Any]]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def chat_template(tokenizer: Any) -> str | None:
    """The template used for conversations, or None."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return None
    return str(template)


def tokenize_chat(
    tokenizer: Any, messages: Messages, origin: str, tools: list[Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Token ids of the rendered conversation and True for each token of an assistant turn."""
    template = chat_template(tokenizer)
    if template is None:
        raise ExtractError("the tokenizer has no chat template: pass one with --chat-template FILE")
    try:
        if _GENERATION.search(template):
            return _by_markers(tokenizer, messages, tools)
        return _by_prefixes(tokenizer, messages, tools) or _by_content(tokenizer, messages, origin, tools)
    except TemplateError as error:
        raise SourceError(f"{origin}: the chat template refuses this conversation: {error}") from error
    except (KeyError, TypeError) as error:
        raise SourceError(f"{origin}: a message has the wrong fields: {error!r}") from error


def _render(tokenizer: Any, messages: Messages, tools: list[Any] | None, **options: Any) -> Any:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, **options)


def _ids(tokenizer: Any, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> list[int]:
    return list(_render(tokenizer, messages, tools, add_generation_prompt=prompt)["input_ids"])


def _by_markers(tokenizer: Any, messages: Messages, tools: list[Any] | None) -> tuple[list[int], list[bool]]:
    out = _render(tokenizer, messages, tools, return_assistant_tokens_mask=True)
    return list(out["input_ids"]), [bool(flag) for flag in out["assistant_masks"]]


def _by_prefixes(
    tokenizer: Any, messages: Messages, tools: list[Any] | None
) -> tuple[list[int], list[bool]] | None:
    ids = _ids(tokenizer, messages, tools)
    spans: list[Span] = []
    for turn in _assistant_turns(messages):
        before = _ids(tokenizer, messages[:turn], tools, prompt=True) if turn else []
        through = _ids(tokenizer, messages[: turn + 1], tools)
        if not (_is_prefix(before, through) and _is_prefix(through, ids)):
            return None
        spans.append((len(before), _end_of_turn(tokenizer, ids, len(before), len(through))))
    return ids, _mask(len(ids), spans)


def _assistant_turns(messages: Messages) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _is_prefix(head: Sequence[int], whole: Sequence[int]) -> bool:
    return len(head) <= len(whole) and list(whole[: len(head)]) == list(head)


def _end_of_turn(tokenizer: Any, ids: Sequence[int], start: int, stop: int) -> int:
    """The end of a span without the white space that templates put after the end-of-turn token."""
    end = stop
    while end > start and not tokenizer.decode([ids[end - 1]]).strip():
        end -= 1
    return end if end > start and ids[end - 1] in _special_ids(tokenizer) else stop


def _special_ids(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder.items()
    return set(tokenizer.all_special_ids) | {number for number, token in added if token.special}


def _by_content(
    tokenizer: Any, messages: Messages, origin: str, tools: list[Any] | None
) -> tuple[list[int], list[bool]]:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    mask = [False] * len(ids)
    for start, stop in _content_spans(text, messages, origin):
        inside = [n for n, (a, b) in enumerate(offsets) if a < stop and b > start]
        for number in inside:
            mask[number] = True
        _include_end_of_turn(tokenizer, ids, mask, inside)
    return ids, mask


def _content_spans(text: str, messages: Messages, origin: str) -> list[Span]:
    spans, cursor = [], 0
    for message in messages:
        span = _find_content(text, message, cursor)
        if span is not None:
            cursor = span[1]
        if message["role"] == "assistant":
            if span is None:
                raise SourceError(f"{origin}: an assistant turn cannot be found in the rendered conversation")
            spans.append(span)
    return spans


def _find_content(text: str, message: dict[str, Any], cursor: int) -> Span | None:
    """Where the content, whole or without its reasoning, stands in `text` after `cursor`."""
    content = message.get("content")
    if not isinstance(content, str):
        return None
    for part in (content.strip(), content.rpartition("</think>")[2].strip()):
        start = text.find(part, cursor) if part else -1
        if start >= 0:
            return start, start + len(part)
    return None


def _include_end_of_turn(tokenizer: Any, ids: list[int], mask: list[bool], inside: list[int]) -> None:
    after = inside[-1] + 1 if inside else len(ids)
    if after < len(ids) and ids[after] in _special_ids(tokenizer):
        mask[after] = True


def _mask(length: int, spans: Sequence[Span]) -> list[bool]:
    mask = [False] * length
    for start, stop in spans:
        mask[start:stop] = [True] * (stop - start)
    return mask
