"""One audit from start to end.

In: a root, a model's folder, `Settings`. Out: a `Report`. Refused: what `choose`, `lens` and the reader
refuse. What cannot be checked (layers where the model cannot be run, masks without a template) becomes a
note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from hsstream.audit import choose, judge, masks, probe
from hsstream.audit.choose import Piece
from hsstream.audit.judge import Fit
from hsstream.audit.lens import Lens
from hsstream.audit.report import Figures, Finding, Report
from hsstream.errors import SampleError
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo
from hsstream.trainers.base import layer_outputs

AUX, LAST = "aux_hidden_states", "last_hidden_state"
#: Less than this gained, in nats a token, and nothing is predicted.
LEAST_GAIN = 1.0
#: Arbitrary tokens that gains are measured against.
POOL = 256
#: Bounds of `by_position`.
POSITIONS = (16, 64, 256, 1024, 4096)
#: Sources that get a line of their own.
SOURCES = 20


@dataclass(frozen=True)
class Settings:
    """samples: how many are looked at, evenly spread; 0: all. tokens: rows of each. run: samples that the
    model itself is run on; 0: none. device: where the head and the model compute."""

    samples: int = 32
    tokens: int = 256
    run: int = 4
    device: str = "cpu"


def audit(
    root: str,
    model: str,
    settings: Settings | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Check a capture against its model.

    Raises:
        SampleError: nothing to audit, or a model that does not fit or cannot be read.
        StorageError, FormatError: the data set cannot be read.
    """
    return _Audit(root, model, settings or Settings(), storage_options).report(progress)


class _Audit:
    def __init__(
        self, root: str, model: str, settings: Settings, storage_options: dict[str, Any] | None
    ) -> None:
        self._settings, self._model = settings, model
        self._reader = ShardReader(root, storage_options)
        choose.check(self._reader)
        self._info = self._reader.index.info
        self._facts = self._info.model or ModelInfo()
        self._lens = Lens(model, settings.device)
        self._lens.check(self._info.schema.by_name[LAST].trailing[-1])
        self._report = Report(root, model)
        self._normed = True

    def report(self, progress: Callable[[int, int], None] | None) -> Report:
        numbers = choose.numbers(len(self._reader), self._settings.samples)
        found = [choose.pieces(self._reader, number, self._settings.tokens) for number in numbers]
        pieces = [piece for both in found for piece in both]
        self._report.samples = len(numbers)
        self._zeros(pieces)
        choose.mark_own(pieces)
        pieces = [choose.stored(piece) for piece in pieces]
        self._norm(pieces)
        fits = self._fits(pieces, progress)
        self._count(fits)
        self._judge(fits)
        self._masks()
        self._layers(numbers)
        return self._report

    # -- last states and tokens ------------------------------------------------------------------

    def _zeros(self, pieces: Sequence[Piece]) -> None:
        """Rows without values, where the data set is to have all of them."""
        if self._info.last_rows != "all":
            return
        keys = [piece.key for piece in pieces if bool((piece.last == 0).all(dim=1).any())]
        self._find("zeros", "{} samples have rows of last_hidden_state that are all zero", keys)

    def _norm(self, pieces: Sequence[Piece]) -> None:
        declared = self._facts.last_hidden_norm or "unknown"
        states = torch.cat([piece.last for piece in pieces]) if pieces else torch.empty(0, 0)
        normed = self._lens.is_normed(states)
        found = declared if normed is None else "post" if normed else "pre"
        self._report.norm = {"declared": declared, "found": found}
        self._normed = found == "post"
        if normed is None:
            self._report.notes.append(f"norm not checked: {self._lens.why or 'no rows'}")
        elif declared == "unknown":
            self._report.notes.append(
                f"the data set does not say how last_hidden_state was captured: {found}"
            )
        elif declared != found:
            message = f"last_hidden_state is said to be {declared}-norm, it is {found}-norm"
            self._report.findings.append(Finding("norm", message))

    def _states(self, piece: Piece) -> torch.Tensor:
        """After the norm."""
        return piece.last if self._normed else self._lens.normed(piece.last)

    def _fits(self, pieces: Sequence[Piece], progress: Callable[[int, int], None] | None) -> list[Fit]:
        self._pool = _pool(pieces, self._lens.vocabulary)
        fits = []
        for number, piece in enumerate(pieces):
            if len(piece.places):
                fits.append(judge.fit(self._lens, piece, self._states(piece), self._pool))
            if progress is not None:
                progress(number + 1, len(pieces))
        return fits

    def _count(self, fits: Sequence[Fit]) -> None:
        """Cross-entropy and first choices of all tokens, by position and by source."""
        report = self._report
        common = {name for name, _ in Counter(each.piece.source for each in fits).most_common(SOURCES)}
        for each in fits:
            places = each.piece.places[each.piece.places + 1 < len(each.piece.ids)]
            source = each.piece.source if each.piece.source in common else "others"
            for figures in (report.total, report.by_source.setdefault(source, Figures())):
                figures.add(each.tokens, float(each.nats_of.sum()), int(each.right.sum()))
            for name, rows in _positions(places):
                figures = report.by_position.setdefault(name, Figures())
                figures.add(int(rows.sum()), float(each.nats_of[rows].sum()), int(each.right[rows].sum()))

    def _judge(self, fits: Sequence[Fit]) -> None:
        usual = judge.typical(fits)
        if usual < LEAST_GAIN:
            message = (
                f"the states predict the tokens after them no better ({usual:.2f} nats) than any others: of "
                "another model or other tokens, or of a layer far from the last"
            )
            self._report.findings.append(Finding("fit", message))
            return
        by_key: dict[str, list[Fit]] = {}
        for each in fits:
            if judge.is_suspect(each, usual):
                by_key.setdefault(each.piece.key, []).append(each)
        groups: dict[tuple[str, str], list[str]] = {}
        others = list({each.piece.key: each.piece for each in fits}.values())
        for key, suspects in by_key.items():
            # Two pieces of one sample have one cause; what is known surest says which.
            causes = [self._cause(each, others, usual) for each in suspects]
            groups.setdefault(max(causes)[1:], []).append(key)
        for (kind, message), keys in groups.items():
            self._find(kind, message, keys)

    def _cause(self, each: Fit, others: Sequence[Piece], usual: float) -> tuple[float, str, str]:
        """(how sure, kind, message) for a piece whose states do not belong to its tokens."""
        least = judge.EXPLAINED * usual
        name, gain = judge.owner(self._lens, each, self._states(each.piece), others, self._pool)
        if each.shifted >= max(least, gain):
            return each.shifted, *_shifted(each.shift)
        if gain >= least:
            return gain, "request", f"{{}} samples: states belong to the tokens of {name}"
        return float("-inf"), "request", "{} samples: states do not belong to their tokens"

    def _find(self, kind: str, message: str, keys: Sequence[str]) -> None:
        """A finding that names samples; nothing without any."""
        named = tuple(dict.fromkeys(keys))
        if named:
            self._report.findings.append(Finding(kind, message.format(len(named)), named))

    # -- masks and layers ------------------------------------------------------------------------

    def _masks(self) -> None:
        if choose.MASK not in self._info.schema.by_name:
            self._report.notes.append("masks not checked: the data set has none")
            return
        found = masks.spans(choose.masks(self._reader))
        findings, why = masks.judge(found)
        self._report.spans = len(found)
        self._report.findings += findings
        self._report.notes += [why] if why else []

    def _layers(self, numbers: Sequence[int]) -> None:
        if self._settings.run == 0:
            self._report.notes.append("layers not checked: the model was not run")
            return
        try:
            self._probe(numbers)
        except SampleError as error:
            self._report.notes.append(f"layers not checked: {error}")

    def _probe(self, numbers: Sequence[int]) -> None:
        spec = self._info.schema.by_name[LAST]
        model = probe.Probe(self._model, self._lens, spec.dtype, self._settings.device)
        suspects = set(self._report.suspects)
        right = [n for n in numbers if self._reader.index.table.key(n) not in suspects] or list(numbers)
        errors, stored = [], self._stored()
        for number in [right[place] for place in choose.numbers(len(right), self._settings.run)]:
            sample = self._reader.read(number, slice(0, self._settings.tokens))
            outputs = model.outputs(sample.tensors[choose.IDS])
            states = [*(sample.tensors[AUX].unbind(1) if AUX in sample.tensors else ()), sample.tensors[LAST]]
            kept = (sample.tensors[LAST] != 0).any(dim=1)
            errors.append(
                [
                    model.errors(state, rows[kept], outputs[:, kept])
                    for state, rows in zip(stored, states, strict=True)
                ]
            )
        answers = probe.closest(stored, errors)
        self._report.layers = [answer.to_dict() for answer in answers]
        for answer in answers:
            if answer.wrong is not None:
                self._report.findings.append(Finding("layer", answer.wrong))

    def _stored(self) -> list[probe.Stored]:
        """Every stored state of a token, the last one last."""
        spec = self._info.schema.by_name.get(AUX)
        count = spec.layers or 0 if spec is not None else 0
        ids, convention = self._facts.aux_layer_ids, self._facts.layer_id_convention
        declared: Sequence[int | None] = [None] * count
        if ids is not None and convention is not None and len(ids) == count:
            declared = layer_outputs(ids, convention)
        elif count:
            self._report.notes.append("the data set does not say which layers aux_hidden_states holds")
        norms = self._facts.aux_hidden_norm or ()
        aux = [
            probe.Stored(f"{AUX}[{n}]", layer, n < len(norms) and norms[n] == "post")
            for n, layer in enumerate(declared)
        ]
        layers = self._facts.num_layers
        return [*aux, probe.Stored(LAST, None if layers is None else layers - 1, self._normed)]


def _shifted(shift: int) -> tuple[str, str]:
    """(kind, message) for states that predict the tokens behind another place."""
    side, count = ("later" if shift > 0 else "earlier"), abs(shift)
    text = f"{{}} samples: states belong to the tokens {count} place{'s' * (count > 1)} {side}"
    if count <= 2:
        return "shift", text
    return "prefix", text + (f": those of the first {count} tokens are missing" if shift > 0 else "")


def _pool(pieces: Sequence[Piece], vocabulary: int) -> torch.Tensor:
    """Arbitrary tokens of the data, the same each time."""
    ids = torch.cat([piece.ids for piece in pieces]) if pieces else torch.zeros(0, dtype=torch.int64)
    if ids.numel() and int(ids.max()) >= vocabulary:
        raise SampleError(
            f"input_ids reach {int(ids.max())}, the model's head has {vocabulary} tokens: another model?"
        )
    drawn = torch.randint(max(1, len(ids)), (POOL,), generator=torch.Generator().manual_seed(0))
    return ids[drawn] if len(ids) else ids


def _positions(places: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(name, which rows) of every range of POSITIONS that has any."""
    bounds = [0, *POSITIONS, 1 << 40]
    names = [f"{a}-{b - 1}" for a, b in pairwise(bounds[:-1])] + [f"{POSITIONS[-1]}-"]
    rows = [(places >= a) & (places < b) for a, b in pairwise(bounds)]
    return [(name, row) for name, row in zip(names, rows, strict=True) if bool(row.any())]
