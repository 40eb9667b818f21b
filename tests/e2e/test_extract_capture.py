"""What tools/extract.py captures from a model, batches, and marks as supervised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import CHAT, MARKED_TEMPLATE, REWRITING_TEMPLATE, TEMPLATE, make_model, make_tokenizer

# tiny_model puts tools/ on the path
from extraction import masks  # isort: skip
from extraction.batches import batches  # isort: skip
from extraction.capture import Capture, default_layers  # isort: skip
from extraction.errors import ExtractError, SourceError  # isort: skip
from extraction.tokens import TokenSample  # isort: skip

LAYERS = (1, 3, 7)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2"])
def test_hooks_take_what_output_hidden_states_returns(kind: str) -> None:
    model = make_model(kind)
    ids, mask = _padded_ids()
    aux, last = Capture(model, LAYERS)(ids, mask)
    with torch.inference_mode():
        full = model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
    assert torch.equal(aux[:, :, 0], full[2])
    assert torch.equal(aux[:, :, 1], full[4])
    assert torch.equal(last, full[-1])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2"])
def test_post_is_what_the_head_reads_and_pre_is_what_the_norm_reads(kind: str) -> None:
    model = make_model(kind)
    ids, mask = _padded_ids()
    post, pre = Capture(model, LAYERS, "post"), Capture(model, LAYERS, "pre")
    aux, last_post = post(ids, mask)
    _, last_pre = pre(ids, mask)
    assert (post.norm_found, pre.norm_found) == ("post", "pre")
    assert torch.equal(last_pre, aux[:, :, 2])
    with torch.inference_mode():
        assert torch.equal(pre.parts.norm(last_pre), last_post)  # type: ignore[misc]
        assert torch.equal(model.get_output_embeddings()(last_post), model(ids, attention_mask=mask).logits)


def test_a_last_state_that_is_not_the_norms_output_is_called_unknown() -> None:
    model = make_model("opt")
    assert Capture(model, LAYERS).norm_found == "unknown"
    with pytest.raises(ExtractError, match="no final norm"):
        Capture(model, LAYERS, "pre")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_padding_does_not_change_the_states_of_real_tokens(kind: str) -> None:
    capture = Capture(make_model(kind), LAYERS)
    ids, mask = _padded_ids()
    aux, last = capture(ids, mask)
    alone_aux, alone_last = capture(ids[1:, :12], mask[1:, :12])
    torch.testing.assert_close(aux[1, :12], alone_aux[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[1, :12], alone_last[0], rtol=1e-4, atol=1e-5)


def _padded_ids() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    return ids, mask


def test_default_layers_are_early_middle_and_late() -> None:
    assert default_layers(30) == (1, 14, 26)
    assert default_layers(8) == (1, 3, 4)
    with pytest.raises(ExtractError, match="--layers"):
        default_layers(4)


def test_batches_keep_their_bounds_and_every_sample() -> None:
    random = np.random.default_rng(0)
    window = [_token_sample(n, int(random.integers(1, 90))) for n in range(50)]
    made = list(batches(window, batch_size=6, batch_tokens=256, pad_id=7))
    assert sorted(sample.key for batch in made for sample in batch.samples) == sorted(s.key for s in window)
    for batch in made:
        assert len(batch.samples) <= 6
        assert batch.ids.numel() <= 256
        assert batch.mask.sum(1).tolist() == [len(sample) for sample in batch.samples]
        assert (batch.ids[batch.mask == 0] == 7).all()
        assert (batch.ids[batch.mask == 1] == 5).all()


def _token_sample(number: int, length: int) -> TokenSample:
    return TokenSample(f"k{number}", np.full(length, 5, np.int32), np.ones(length, np.uint8), {})


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE], ids=["prefixes", "markers"])
def test_assistant_turns_are_supervised_up_to_their_end_of_turn_token(template: str) -> None:
    tokenizer = make_tokenizer(template)
    assert _supervised_texts(tokenizer, CHAT) == [
        "It is four.<|im_end|>",
        "That is six, as anyone can count.<|im_end|>",
    ]


def test_turns_that_the_template_rewrites_are_found_by_their_content() -> None:
    thinking = [dict(m) for m in CHAT]
    thinking[1]["content"] = "<think>easy</think>\n\nIt is four."
    thinking[3]["content"] = "<think>hm</think>\n\nThat is six."
    assert _supervised_texts(make_tokenizer(REWRITING_TEMPLATE), thinking) == [
        "It is four.<|im_end|>",
        "<think>hm</think>\n\nThat is six.<|im_end|>",
    ]


def test_a_turn_that_no_rule_can_place_is_refused() -> None:
    shouting = "{% for m in messages %}{{ loop.length }}{{ m['content'] | upper }}<|im_end|>\n{% endfor %}"
    with pytest.raises(SourceError, match=r"here:7: an assistant turn"):
        masks.tokenize_chat(make_tokenizer(shouting), CHAT, "here:7")


def _supervised_texts(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    ids, mask = masks.tokenize_chat(tokenizer, messages, "here")
    edges = np.flatnonzero(np.diff([0, *map(int, mask), 0]))
    return [tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
