"""The samples every loader reads: real hidden states of a small model, or random ones for tests.

In: how many tokens. Out: a `Source`, an hsstream data set of the exact bf16 states (codec `raw`) that is
made once and kept. Refused: packages that the extraction needs and that are missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import hsstream as hs
from benchmark.errors import BenchError
from hsstream.sample import HIDDEN_STATES

TOOLS = Path(__file__).resolve().parent.parent
CACHE = TOOLS.parent / ".cache" / "bench"
FULL_TOKENS, QUICK_TOKENS = 120_000, 30_000
#: Tokens that make one of `wide_source`: 5 x 576 values are the width of GPT-OSS-120B.
WIDE = 5
#: Of a wide sample, at least, and of all of them: ordinary data sets have samples of 2,000 tokens.
LONG, WIDE_TOKENS = 1_800, 60_000
#: Samples in a batch, here and in every loader.
BATCH = 4


@dataclass(frozen=True)
class Source:
    """Exact states at `root`. folder: where what is made from them is kept; title: in words."""

    folder: Path
    title: str

    @property
    def root(self) -> Path:
        """An hsstream data set, raw and uncompressed."""
        return self.folder / "states"

    def reader(self) -> hs.ShardReader:
        """Random access to the samples."""
        return hs.ShardReader(self.root)

    def samples(self) -> Iterator[hs.Sample]:
        """In storage order, the order in which every loader delivers them."""
        return iter(self.reader())

    def facts(self) -> SourceFacts:
        """Numbers of samples, tokens and bytes."""
        reader = self.reader()
        shape = {spec.name: spec.trailing for spec in reader.index.info.schema.tensors}
        layers, hidden = shape["aux_hidden_states"]
        lengths = reader.lengths()
        batches = [lengths[at : at + BATCH] for at in range(0, len(lengths), BATCH)]
        padded = sum(len(batch) * max(batch) for batch in batches)
        return SourceFacts(self.title, len(lengths), sum(lengths), padded, layers, hidden)


@dataclass(frozen=True)
class SourceFacts:
    """padded: tokens of all batches with their padding; layers: captured ones, beside the last state."""

    title: str
    samples: int
    tokens: int
    padded: int
    layers: int
    hidden: int

    @property
    def token_bytes(self) -> int:
        """Bytes of the states of a token as bf16."""
        return 2 * (self.layers + 1) * self.hidden

    @property
    def state_bytes(self) -> int:
        """Bytes of all states as bf16, without padding: what GB/s are counted in."""
        return self.tokens * self.token_bytes

    def line(self) -> str:
        """In one line."""
        return (
            f"{self.title}: {self.samples:,} samples, {self.tokens:,} tokens, "
            f"{self.layers} + 1 states of {self.hidden} values, {self.state_bytes / 1e6:,.0f} MB as bf16, "
            f"{1 - self.tokens / self.padded:.0%} padding in batches of {BATCH}"
        )


def real_source(tokens: int, cache: Path = CACHE) -> Source:
    """States of SmolLM2-135M over the Python documentation and package READMEs; extracted when missing."""
    source = Source(cache / f"real-{tokens}", "SmolLM2-135M on documentation and READMEs")
    if not (source.root / "manifest.json").is_file():
        _extract(source, tokens)
    return source


def _extract(source: Source, tokens: int) -> None:
    import demo_text
    import smollm2

    text = source.folder / "text.jsonl"
    source.folder.mkdir(parents=True, exist_ok=True)
    if not text.is_file():
        lines = [json.dumps({"name": name, "text": words}) for name, words in demo_text.documents()]
        text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        model = smollm2.find_gguf()
    except smollm2.ModelNotFoundError as error:
        raise BenchError(str(error), 2) from error
    sys.stderr.write(f"bench: extracting {tokens:,} tokens of hidden states, once; minutes on one core\n")
    captured = source.folder / "captured"
    # float32: many processors are slow in bf16, in which the states are stored then.
    command = [
        *(sys.executable, str(TOOLS / "extract.py"), "--model", str(model), "--out", str(captured)),
        *("--codec", "raw", "--compression", "none", "--dtype", "float32"),
        *("--max-tokens", str(tokens), "--max-length", "512", str(text)),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TOOLS.parent)}
    if subprocess.run(command, env=environment, check=False).returncode:
        raise BenchError("the extraction failed, see above: the same command continues it")
    with hs.ShardWriter(source.root, codec="raw", compression="none") as writer:
        for sample in hs.ShardReader(captured):
            states = {name: sample.tensors[name].bfloat16() for name in HIDDEN_STATES}
            writer.write(sample.key, sample.tensors | states)
    shutil.rmtree(captured)


def wide_source(narrow: Source) -> Source:
    """The same states as a large model has them: each token has the vectors of WIDE tokens side by side, from
    as many places of the text, each sample those of several samples one after another.
    """
    title = f"{narrow.title}, the vectors of {WIDE} tokens side by side"
    source = Source(narrow.folder / f"wide-{WIDE_TOKENS}", title)
    if (source.root / "manifest.json").is_file():
        return source
    samples = [sample.tensors for sample in narrow.samples()]
    joined = {name: torch.cat([tensors[name] for tensors in samples]) for name in samples[0]}
    start = stop = 0
    with hs.ShardWriter(source.root, codec="raw", compression="none") as writer:
        for tensors in samples:
            stop += len(tensors["input_ids"])
            if stop - start >= LONG and start < WIDE_TOKENS:
                key = f"wide-{start:06d}"
                if key not in writer:
                    writer.write(key, _side_by_side(joined, start, stop))
                start = stop
    return source


def _side_by_side(joined: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    total = len(joined["input_ids"])
    places = [(torch.arange(start, stop) + total * part // WIDE) % total for part in range(WIDE)]
    return {
        name: torch.cat([values[rows] for rows in places], dim=-1)
        if name in HIDDEN_STATES
        else values[places[0]]
        for name, values in joined.items()
    }


def synthetic_source(cache: Path, samples: int = 20, layers: int = 3, hidden: int = 64) -> Source:
    """Random states of random lengths from 10 to 90; the same every time."""
    source = Source(cache / f"synthetic-{samples}-{layers}-{hidden}", "random numbers")
    if (source.root / "manifest.json").is_file():
        return source
    draw = np.random.default_rng(0)
    model = hs.ModelInfo(name="random", hidden_size=hidden, aux_layer_ids=tuple(range(layers)))
    with hs.ShardWriter(source.root, codec="raw", compression="none", model=model) as writer:
        for number in range(samples):
            tokens = int(draw.integers(10, 91))
            states = torch.from_numpy(draw.standard_normal((tokens, layers + 1, hidden), np.float32))
            writer.write(
                f"random-{number:05d}",
                {
                    "input_ids": torch.from_numpy(draw.integers(0, 1000, tokens)),
                    "loss_mask": torch.ones(tokens, dtype=torch.uint8),
                    "aux_hidden_states": states[:, :layers].bfloat16(),
                    "last_hidden_state": states[:, layers].bfloat16(),
                },
            )
    return source
