"""An estimate measured on samples: encoded and decoded by the codecs themselves, as a writer stores them.

In: samples, an lm_head to judge the teacher by. Out: an `Estimate`. Refused with SampleError: no sample,
none with hidden states, an lm_head of another width or without a last hidden state to judge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hsstream.codecs import parse_codec
from hsstream.decoding import read_tensor
from hsstream.encoding import Record, encode, seal
from hsstream.errors import SampleError
from hsstream.estimate.draw import ENOUGH_TOKENS
from hsstream.estimate.numbers import CODECS, TOP_K
from hsstream.estimate.result import Estimate, Rung
from hsstream.presets import PRESETS, check_codec, codec_for, codec_text
from hsstream.sample import HIDDEN_STATES, Sample
from hsstream.schema import schema_of
from hsstream.table import TAR_BLOCK
from hsstream.teacher import TopKTeacher

LAST = "last_hidden_state"
#: Multiplications that judging the teacher of one rung may take: seconds on a few cores.
JUDGE_FLOPS, LEAST_JUDGED = 2e11, 256


@dataclass(frozen=True)
class Case:
    """What is measured: a name, and `codec` and `compression` as a writer takes them."""

    name: str
    codec: str | Mapping[str, str]
    compression: str | None = None

    @property
    def last_codec(self) -> str:
        """What stores the last hidden state."""
        return codec_for(LAST, self.codec)


class Teacher:
    """What turns last states into distributions.

    lm_head: [V, H], kept in float32, in which CPUs are fast; norm: for states captured before it.
    """

    def __init__(
        self, lm_head: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        self.lm_head, self.norm = lm_head.float(), norm

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """The states that the lm_head takes."""
        return states if self.norm is None else self.norm(states)

    def log_probs(self, states: torch.Tensor) -> torch.Tensor:
        """[S, H] to [S, V], float32."""
        return torch.log_softmax(self.normed(states).float() @ self.lm_head.T, dim=-1)


def cases_for(codecs: Iterable[str | Mapping[str, str]] = ()) -> list[Case]:
    """Every preset, the single codecs between them, and the caller's own."""
    found = [Case(name, name) for name in PRESETS]
    for name in CODECS:
        codec, _, compression = name.partition(", ")
        found.append(Case(name, codec, compression or None))
    for own in codecs:
        check_codec(own)
        if all(codec_text(own) != case.name for case in found):
            found.append(Case(codec_text(own), own))
    return found


def from_samples(
    samples: Iterable[Sample],
    tokens: int | None = None,
    lm_head: torch.Tensor | Teacher | None = None,
    enough: int = ENOUGH_TOKENS,
    codecs: Iterable[str | Mapping[str, str]] = (),
    note: str = "",
) -> Estimate:
    """An estimate measured on samples, the first ones up to `enough` tokens.

    tokens: of the whole data set; None: those of all samples given. lm_head: [V, H], for the teacher.
    codecs: measured beside the presets. note: added to the estimate's `basis`.
    """
    teacher = Teacher(lm_head) if isinstance(lm_head, torch.Tensor) else lm_head
    taken: list[Sample] = []
    seen = 0
    for sample in samples:
        if sum(s.tokens for s in taken) < enough:
            taken.append(sample)
        seen += sample.tokens
    states = [name for name in HIDDEN_STATES if taken and name in taken[0].tensors]
    _check(taken, states, teacher)
    rungs = _measure(cases_for(codecs), taken, states, teacher)
    measured = sum(sample.tokens for sample in taken)
    basis = f"measured on {len(taken)} samples, {measured:,} tokens{note}"
    values = sum(taken[0].tensors[name][0].numel() for name in states)
    return Estimate(basis, tokens or seen, 2.0 * values, rungs)


def _check(samples: Sequence[Sample], states: Sequence[str], teacher: Teacher | None) -> None:
    if not states:
        raise SampleError(
            "no sample with aux_hidden_states or last_hidden_state to measure: point to a data set or to "
            "files that hold them, or give --hidden, --vectors and --tokens"
        )
    if teacher is None:
        return
    if LAST not in states:
        raise SampleError("an lm_head judges last_hidden_state, which the samples do not hold: leave it out")
    width = samples[0].tensors[LAST].shape[-1]
    if teacher.lm_head.ndim != 2 or teacher.lm_head.shape[1] != width:
        found = list(teacher.lm_head.shape)
        raise SampleError(f"the lm_head is {found}, the states are {width} wide: is it this model's head?")
    largest = max((int(s.tensors["input_ids"].max()) for s in samples if "input_ids" in s.tensors), default=0)
    if largest >= len(teacher.lm_head):
        found = list(teacher.lm_head.shape)
        raise SampleError(
            f"the lm_head is {found}, the token ids go up to {largest}: is it this model's head?"
        )


def _measure(
    cases: Sequence[Case], samples: Sequence[Sample], states: Sequence[str], teacher: Teacher | None
) -> list[Rung]:
    meters = [_Meter(case, states, teacher) for case in cases if _possible(case, samples[0], states, teacher)]
    for meter in meters:
        meter.warm_up(samples[0])
    judge = None if teacher is None else _Judge(teacher, sum(sample.tokens for sample in samples))
    for sample in samples:
        found = {}
        for meter in meters:
            decoded = meter.add(sample)
            if judge is not None and LAST in decoded:
                found[meter.case.last_codec] = decoded[LAST]
        if judge is not None:
            judge.add(sample.tensors[LAST], found)
    return [meter.rung(judge) for meter in meters]


def _possible(case: Case, sample: Sample, states: Sequence[str], teacher: Teacher | None) -> bool:
    """Whether a writer would take the samples with this codec; the caller's own codecs must be."""
    if case.codec == "sparse" and teacher is None:
        return False
    if not isinstance(case.codec, str) or case.codec not in PRESETS:
        return True
    try:
        for name in states:
            parse_codec(codec_for(name, case.codec)).check(sample.tensors[name].dtype)
    except SampleError:
        return False
    return True


class _Meter:
    """Adds up one case over samples."""

    def __init__(self, case: Case, states: Sequence[str], teacher: Teacher | None) -> None:
        self.case, self._states, self._teacher = case, states, None
        if case.codec == "sparse" and teacher is not None:
            self._normed = teacher.normed
            self._teacher = TopKTeacher(teacher.lm_head, min(TOP_K, len(teacher.lm_head)))
        self._squares: dict[str, float] = {}
        self._mass = 0.0
        self._nbytes = self._bf16 = self._tokens = 0
        self._encoding = self._decoding = 0.0

    def warm_up(self, sample: Sample) -> None:
        """Compile what is compiled at its first use."""
        few = Sample(sample.key, {name: value[:2] for name, value in sample.tensors.items()}, {})
        stored = self._stored(few)
        self._decode(seal(encode(stored, schema_of(stored, self.case.codec, self.case.compression))))
        self._decoding = 0.0

    def add(self, sample: Sample) -> dict[str, torch.Tensor]:
        """Encode, measure, decode, compare; the decoded states."""
        stored = self._stored(sample)
        schema = schema_of(stored, self.case.codec, self.case.compression)
        started = time.perf_counter()
        record = seal(encode(stored, schema))
        self._encoding += time.perf_counter() - started
        self._nbytes += _file_bytes(record)
        self._tokens += sample.tokens
        if self._teacher is not None:
            self._mass += _kept_mass(stored.tensors)
        decoded = self._decode(record)
        for name in self._states:
            self._bf16 += 2 * sample.tensors[name].numel()
            if name in decoded:
                self._compare(name, sample.tensors[name], decoded[name])
        return decoded

    def _stored(self, sample: Sample) -> Sample:
        if self._teacher is None:
            return sample
        targets = self._teacher.targets(self._normed(sample.tensors[LAST]))
        kept = {name: value for name, value in sample.tensors.items() if name != LAST}
        return Sample(sample.key, kept | targets, {})

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
        layered = exact.ndim > 2
        layers = zip(exact.unbind(1), decoded.unbind(1), strict=True) if layered else ((exact, decoded),)
        for layer, (true, found) in enumerate(layers):
            label = f"{name}.{layer}" if layered else name
            size = true.float().square().sum(-1)
            error = (found.float() - true.float()).square().sum(-1)
            relative = torch.where(size > 0, error / size.clamp_min(1e-38), 0.0)
            self._squares[label] = self._squares.get(label, 0.0) + float(relative.sum())

    def rung(self, judge: _Judge | None) -> Rung:
        """The means."""
        kl = top1 = None
        if judge is not None and self._teacher is None:
            kl, top1 = judge.result(self.case.last_codec)
        return Rung(
            name=self.case.name,
            bytes_per_token=self._nbytes / self._tokens,
            ratio=self._nbytes / self._bf16,
            errors={label: (total / self._tokens) ** 0.5 for label, total in self._squares.items()},
            kl=kl,
            top1=top1,
            kept_mass=self._mass / self._tokens if self._teacher is not None else None,
            encode=self._bf16 / self._encoding / 1e9,
            decode=self._bf16 / self._decoding / 1e9,
        )


class _Judge:
    """Compares distributions of the teacher; of very large heads, on every n-th token."""

    def __init__(self, teacher: Teacher, tokens: int) -> None:
        self._teacher = teacher
        most = max(LEAST_JUDGED, int(JUDGE_FLOPS / (2 * teacher.lm_head.numel())))
        self._stride = -(-tokens // most)
        self._judged = 0
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, exact: torch.Tensor, decoded: Mapping[str, torch.Tensor]) -> None:
        """One sample: its exact last states and what each codec made of them."""
        rows = torch.arange(0, len(exact), self._stride)
        for chosen in rows.split(256):  # type: ignore[no-untyped-call]
            theirs = self._teacher.log_probs(exact[chosen])
            self._judged += len(chosen)
            for codec, states in decoded.items():
                ours = self._teacher.log_probs(states[chosen])
                kl, same = self._sums.get(codec, (0.0, 0))
                kl += float((theirs.exp() * (theirs - ours)).sum())
                same += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
                self._sums[codec] = kl, same

    def result(self, codec: str) -> tuple[float, float]:
        """Mean KL and agreement of one codec."""
        kl, same = self._sums[codec]
        return kl / self._judged, same / self._judged


def _kept_mass(tensors: Mapping[str, torch.Tensor]) -> float:
    logits, total = tensors["target_topk_logits"].float(), tensors["target_logsumexp"]
    return float((logits - total.unsqueeze(-1)).exp().sum())


def _file_bytes(record: Record) -> int:
    """What a sample takes in a shard: tar headers, padding and its share of the index too."""
    sizes = [len(record.header_bytes), *(sum(len(p) for p in pieces) for pieces in record.payloads)]
    tar = sum(TAR_BLOCK + -(-size // TAR_BLOCK) * TAR_BLOCK for size in sizes)
    return tar + 64 + 4 * len(sizes)
