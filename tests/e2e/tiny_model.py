"""A language model small enough for a test (random weights, a real tokenizer and a chat template), and
tools/extract.py run with it on a small source."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))

import extract  # noqa: E402

import hsstream as hs  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MARKED_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}"
    "<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Renders all answers but the last without their reasoning, as some models' templates do.
REWRITING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if loop.last %}{{ message['content'] }}"
    "{% else %}{{ message['content'].split('</think>')[-1].strip() }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CHAT = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And three and three?"},
    {"role": "assistant", "content": "That is six, as anyone can count."},
]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Byte-level BPE without merges worth the name: every text can be tokenised and read back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=310, special_tokens=specials, initial_alphabet=alphabet)
    bpe.train_from_iterator([message["content"] for message in CHAT], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return tokenizer


def make_model(kind: str = "llama") -> Any:
    """A random model of 8 layers and hidden size 32, float32, always the same."""
    import transformers as hf

    torch.manual_seed(0)
    grouped = SIZES | {"num_key_value_heads": 2}
    if kind == "qwen3":
        return hf.Qwen3ForCausalLM(hf.Qwen3Config(**grouped, head_dim=8)).eval()
    if kind == "gemma3":
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**grouped, head_dim=8)).eval()
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=8, n_head=4, vocab_size=320)).eval()
    if kind == "opt":  # its last state is projected after the final norm
        sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
        return hf.OPTForCausalLM(hf.OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=16)).eval()
    return hf.LlamaForCausalLM(hf.LlamaConfig(**grouped)).eval()


def save_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """The model and its tokenizer in a folder that transformers loads."""
    make_model().save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


#: The text files of `make_source`.
TEXTS = {
    "a.txt": "A short text.",
    "b/c.md": "# Another\n\n" + "with many words in it " * 40,
    "d.py": "x = 1\n",
}


def make_source(folder: Path) -> Path:
    """A folder of texts, and of conversations in both spellings."""
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    speakers = {"user": "human", "assistant": "gpt"}
    sharegpt = [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in CHAT]
    rows = [{"messages": CHAT}, {"conversations": sharegpt[:2]}, {"text": "A row of text."}]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def run_extract(model: Path, source: Path, out: Path, *options: str) -> int:
    """The exit code of one run on the CPU in float32, with samples of at most 200 tokens."""
    fixed = ["--model", str(model), "--out", str(out), "--dtype", "float32", "--device", "cpu"]
    return extract.main([*fixed, "--max-length", "200", *options, str(source)])


def samples_of(root: Path) -> dict[str, hs.Sample]:
    """Every sample of a data set by its key."""
    return {sample.key: sample for sample in hs.ShardReader(root)}
