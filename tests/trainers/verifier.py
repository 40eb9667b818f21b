"""A tiny verifier with random weights, states that fit it, and source files of every producer packed.

`made_samples` draws canonical samples; `packed` runs the real importer on a folder of files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sources import draw
from transformers import LlamaConfig, LlamaForCausalLM

from hsstream.catalog import open_catalog
from hsstream.cli import main
from hsstream.packing import Job, pack
from hsstream.sample import ModelInfo
from hsstream.sources.base import Options

HIDDEN, VOCAB, DEPTH = 64, 200, 8
#: Outputs of decoder layers, counted from 0: the defaults of all three trainers at this depth.
LAYERS = (1, 3, 4)
LENGTHS = (33, 64, 17, 50, 41, 29, 64, 12)


def config(**more: Any) -> LlamaConfig:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(settings | more))


def save_verifier(folder: Path) -> Path:
    """Random weights in bf16, as an ordinary model folder."""
    torch.manual_seed(0)
    LlamaForCausalLM(config()).to(torch.bfloat16).save_pretrained(folder)
    return folder


def made_samples(
    lengths: Sequence[int] = LENGTHS, layers: int = len(LAYERS), seed: int = 0
) -> list[dict[str, torch.Tensor]]:
    """Canonical samples: ids from 1 on, the second half supervised, states of a plausible size."""
    made = []
    for number, tokens in enumerate(lengths):
        maker = torch.Generator().manual_seed(seed * 1000 + number)
        mask = torch.zeros(tokens, dtype=torch.bool)
        mask[tokens // 2 :] = True
        made.append(
            {
                "input_ids": torch.randint(1, VOCAB, (tokens,), generator=maker),
                "loss_mask": mask,
                "aux_hidden_states": draw(tokens, layers, HIDDEN, seed=seed + number),
                "last_hidden_state": draw(tokens, HIDDEN, seed=seed + number + 100),
            }
        )
    return made


def packed(
    source: Path, root: Path, form: str, options: Options | None = None, codec: str = "planes", **facts: Any
) -> Path:
    """The files of a producer as a data set, by the importer."""
    known = {"num_layers": DEPTH, "vocab_size": VOCAB, "aux_layer_ids": LAYERS} | facts
    job = Job(str(source), str(root), form, options or Options(), codec=codec, workers=1, facts=known)
    report = pack(job)
    assert report.ok, report.bad
    return root


def model_of(root: Path) -> ModelInfo | None:
    """The model facts of a data set."""
    return open_catalog(root, None).first.index.info.model


def pack_at_once(files: Path, root: Path, *words: str, layers: str | None = None) -> None:
    """`hsstream pack` as a newcomer types it, who deletes the files; layers: what --aux-layers says."""
    more = [] if layers is None else ["--aux-layers", layers]
    assert main(["pack", str(files), str(root), "--delete-source", *words, *more]) == 0


def follow_the_refusal(message: str, root: Path) -> None:
    """Run the `hsstream facts` command that a refusal names, with the data set's root and its layers."""
    (command,) = re.findall(r"hsstream (facts ROOT(?: --set [a-z_]+=[\w,]+)+)", message)
    words = command.replace("ROOT", str(root)).replace("1,14,26", ",".join(map(str, LAYERS))).split(" ")
    assert main(words) == 0
