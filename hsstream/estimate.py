"""What a data set will take on disk, and what each preset does to the states, before a byte is stored.

In: some samples of the user's own states, or bare numbers (hidden size, vectors a token, tokens). Out: an
`Estimate`: for every preset bytes a token, total, ratio to bf16, relative error of each layer, what the
teacher loses, speed of encoding and decoding here, time over a link, what fits. Refused with
SampleError: no sample, none with hidden states, an lm_head of another width.

Samples are encoded and decoded by the codecs themselves, so the figures are what a writer would store.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hsstream.decoding import read_tensor
from hsstream.encoding import Record, encode, seal
from hsstream.errors import SampleError
from hsstream.presets import PRESETS
from hsstream.sample import HIDDEN_STATES, Sample
from hsstream.schema import schema_of
from hsstream.table import TAR_BLOCK
from hsstream.teacher import TopKTeacher

#: Bytes of bf16 on real states (DESIGN.md, "The ladder"): captured layers, last state.
REFERENCE = {
    "lossless": (0.69, 0.69),
    "fp8": (0.505, 0.505),
    "fine": (0.34, 0.34),
    "balanced": (0.14, 0.25),
    "small": (0.11, 0.25),
    "sparse": (0.11, 0.0),
}
TOP_K = 64
#: Stored bytes a token of ids, masks, headers and index, and of a top-k teacher, beside the states.
PLAIN_TOKEN_BYTES = 5.0
TOP_K_BYTES = 6.0 * TOP_K + 4
ENOUGH_TOKENS = 16_384


@dataclass(frozen=True)
class Rung:
    """One preset on the states at hand.

    bytes_per_token: all that is stored, headers and index too; ratio: of the bf16 hidden states.
    errors: relative error of each vector's values, the root mean square over tokens, by tensor and layer.
    kl, top1: of the teacher's distribution from the stored last state against the exact one: mean
    Kullback-Leibler divergence in nats, and how often the first choice is the same. kept_mass: probability
    in the top k. encode, decode: GB of bf16 a second in one process here. None where unknown.
    """

    name: str
    bytes_per_token: float
    ratio: float
    errors: dict[str, float] = field(default_factory=dict)
    kl: float | None = None
    top1: float | None = None
    kept_mass: float | None = None
    encode: float | None = None
    decode: float | None = None

    def total(self, tokens: int) -> float:
        """Bytes of `tokens` tokens."""
        return self.bytes_per_token * tokens


@dataclass(frozen=True)
class Estimate:
    """All presets for one workload. basis: what the figures come from; free: bytes at the destination."""

    basis: str
    tokens: int
    bf16_bytes_per_token: float
    rungs: list[Rung]
    free: int | None = None
    link: float | None = None

    @property
    def bf16_total(self) -> float:
        """Bytes of the hidden states in bf16."""
        return self.bf16_bytes_per_token * self.tokens

    def fits(self, rung: Rung) -> bool | None:
        """Whether a preset fits the destination; None where that is unknown."""
        return None if self.free is None else rung.total(self.tokens) <= self.free

    def seconds(self, nbytes: float) -> float | None:
        """Time to move `nbytes` over the link."""
        return None if self.link is None else nbytes / self.link

    @property
    def verdict(self) -> str:
        """One sentence: does bf16 fit, and which preset to take."""
        totals = {rung.name: rung.total(self.tokens) for rung in self.rungs}
        bf16 = f"bf16 takes {_amount(self.bf16_total, 3)}"
        if self.free is None:
            return f"{bf16}, fp8 {_amount(totals['fp8'])}, balanced {_amount(totals['balanced'])}"
        if self.bf16_total <= self.free:
            return (
                f"{bf16} and fits with {_amount(self.free - self.bf16_total)} to spare; "
                f"balanced takes about {_amount(totals['balanced'])}"
            )
        fitting = [rung.name for rung in self.rungs if self.fits(rung)]
        if not fitting:
            return f"{bf16}, {_amount(self.free)} are free: no preset fits, take fewer tokens"
        return f"{bf16}, {_amount(self.free)} are free: it does not fit, {fitting[0]} does"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rungs = [
            asdict(rung) | {"total_bytes": rung.total(self.tokens), "fits": self.fits(rung)}
            for rung in self.rungs
        ]
        return {
            "basis": self.basis,
            "tokens": self.tokens,
            "bf16_bytes_per_token": self.bf16_bytes_per_token,
            "bf16_total_bytes": self.bf16_total,
            "free_bytes": self.free,
            "link_bytes_per_s": self.link,
            "verdict": self.verdict,
            "presets": rungs,
        }


def from_numbers(hidden: int, vectors: int, tokens: int) -> Estimate:
    """An estimate from bare numbers, by the ratios of real states of another model.

    hidden: values of a vector; vectors: captured layers and the last state together, a token.
    """
    if min(hidden, vectors, tokens) < 1:
        raise SampleError(f"hidden, vectors and tokens must be positive, got {hidden}, {vectors}, {tokens}")
    vector = 2.0 * hidden
    rungs = []
    for name, (aux, last) in REFERENCE.items():
        nbytes = vector * ((vectors - 1) * aux + last) + PLAIN_TOKEN_BYTES
        nbytes += TOP_K_BYTES if name == "sparse" else 0
        rungs.append(Rung(name, nbytes, nbytes / (vector * vectors)))
    basis = "reference ratios, measured on SmolLM2-135M"
    return Estimate(basis, tokens, vector * vectors, rungs)


def from_samples(
    samples: Iterable[Sample],
    tokens: int | None = None,
    lm_head: torch.Tensor | None = None,
    enough: int = ENOUGH_TOKENS,
) -> Estimate:
    """An estimate measured on samples, the first ones up to `enough` tokens.

    tokens: of the whole data set; None: those of all samples given. lm_head: [V, H], for the teacher.
    """
    taken: list[Sample] = []
    seen = 0
    for sample in samples:
        if sum(s.tokens for s in taken) < enough:
            taken.append(sample)
        seen += sample.tokens
    states = [name for name in HIDDEN_STATES if taken and name in taken[0].tensors]
    if not states:
        raise SampleError("no sample with aux_hidden_states or last_hidden_state to measure")
    measured = sum(sample.tokens for sample in taken)
    values = sum(taken[0].tensors[name][0].numel() for name in states)
    names = [name for name in PRESETS if name != "sparse" or lm_head is not None]
    rungs = [_measure(name, taken, states, lm_head) for name in names]
    basis = f"measured on {len(taken)} samples, {measured:,} tokens"
    return Estimate(basis, tokens or seen, 2.0 * values, rungs)


def _measure(name: str, samples: Sequence[Sample], states: list[str], lm_head: torch.Tensor | None) -> Rung:
    teacher = TopKTeacher(lm_head, TOP_K) if name == "sparse" and lm_head is not None else None
    meter = _Meter(states, lm_head)
    for sample in samples:
        meter.add(sample, name, teacher)
    return meter.rung(name)


class _Meter:
    """Adds up one preset over samples."""

    def __init__(self, states: list[str], lm_head: torch.Tensor | None) -> None:
        self._states, self._head = states, lm_head
        self._squares: dict[str, float] = {}
        self._kl = self._same = self._mass = 0.0
        self._nbytes = self._bf16 = self._tokens = self._judged = 0
        self._encoding = self._decoding = 0.0

    def add(self, sample: Sample, preset: str, teacher: TopKTeacher | None) -> None:
        """Encode, measure, decode, compare."""
        tensors: Mapping[str, torch.Tensor] = sample.tensors
        stored = Sample(sample.key, teacher.apply(tensors) if teacher else dict(tensors), sample.meta)
        schema = schema_of(stored, preset, None)
        started = time.perf_counter()
        plain = encode(stored, schema)
        self._encoding += time.perf_counter() - started
        record = seal(plain)
        self._nbytes += _file_bytes(record)
        self._tokens += sample.tokens
        decoded = self._decode(record)
        for name in self._states:
            self._bf16 += 2 * tensors[name].numel()
            if name in decoded:
                self._compare(name, tensors[name], decoded[name])
        if self._head is not None and "last_hidden_state" in tensors:
            if teacher:
                self._mass += _kept_mass(stored.tensors)
            elif "last_hidden_state" in decoded:
                self._judge(tensors["last_hidden_state"], decoded["last_hidden_state"])

    def _decode(self, record: Record) -> dict[str, torch.Tensor]:
        started, column, found = time.perf_counter(), 0, {}
        for name, tensor in record.header.tensors.items():
            members = [memoryview(b"".join(p)) for p in record.payloads[column : column + len(tensor.stored)]]
            column += len(tensor.stored)
            if name in self._states:
                pieces = [(lambda a, b, view=view: view[a:b]) for view in members]
                found[name] = read_tensor(tensor, pieces.__getitem__, range(record.header.tokens))
        self._decoding += time.perf_counter() - started
        return found

    def _compare(self, name: str, exact: torch.Tensor, decoded: torch.Tensor) -> None:
        layers = exact.unbind(1) if exact.ndim > 2 else (exact,)
        for layer, (true, found) in enumerate(
            zip(layers, decoded.unbind(1) if exact.ndim > 2 else (decoded,), strict=True)
        ):
            label = f"{name}.{layer}" if exact.ndim > 2 else name
            size = true.float().square().sum(-1)
            error = (found.float() - true.float()).square().sum(-1)
            relative = torch.where(size > 0, error / size.clamp_min(1e-38), 0.0)
            self._squares[label] = self._squares.get(label, 0.0) + float(relative.sum())

    def _judge(self, exact: torch.Tensor, decoded: torch.Tensor) -> None:
        for true, found in zip(exact.split(256), decoded.split(256), strict=True):  # type: ignore[no-untyped-call]
            ours = _log_probs(found, self._head)
            theirs = _log_probs(true, self._head)
            self._kl += float((theirs.exp() * (theirs - ours)).sum())
            self._same += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
            self._judged += len(true)

    def rung(self, name: str) -> Rung:
        """The means."""
        errors = {label: (total / self._tokens) ** 0.5 for label, total in self._squares.items()}
        judged = self._judged
        return Rung(
            name=name,
            bytes_per_token=self._nbytes / self._tokens,
            ratio=self._nbytes / self._bf16,
            errors=errors,
            kl=self._kl / judged if judged else None,
            top1=self._same / judged if judged else None,
            kept_mass=self._mass / self._tokens if self._mass else None,
            encode=self._bf16 / self._encoding / 1e9,
            decode=self._bf16 / self._decoding / 1e9,
        )


def _log_probs(states: torch.Tensor, head: torch.Tensor | None) -> torch.Tensor:
    if head is None or head.shape[-1] != states.shape[-1]:
        width = None if head is None else head.shape[-1]
        raise SampleError(f"the lm_head takes {width} values, the states have {states.shape[-1]}")
    return torch.log_softmax(states.float() @ head.float().T, dim=-1)


def _kept_mass(tensors: Mapping[str, torch.Tensor]) -> float:
    logits, total = tensors["target_topk_logits"].float(), tensors["target_logsumexp"]
    return float((logits - total.unsqueeze(-1)).exp().sum())


def _amount(nbytes: float, digits: int = 2) -> str:
    unit, scale = ("TB", 1e12) if nbytes >= 1e11 else ("GB", 1e9) if nbytes >= 1e8 else ("MB", 1e6)
    return f"{nbytes / scale:.{digits}f} {unit}"


def _file_bytes(record: Record) -> int:
    """What a sample takes in a shard: tar headers, padding and its share of the index too."""
    sizes = [len(record.header_bytes), *(sum(len(p) for p in pieces) for pieces in record.payloads)]
    tar = sum(TAR_BLOCK + -(-size // TAR_BLOCK) * TAR_BLOCK for size in sizes)
    return tar + 64 + 4 * len(sizes)
