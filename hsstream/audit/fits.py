"""What the model's head says of the last states: figures, and the samples that it suspects.

In: a reader, a `Lens`, numbers of samples. Out: figures in a `Report`, and a finding for each suspected
sample. Refused with SampleError: ids beyond the head's vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from hsstream.audit import choose, judge
from hsstream.audit.choose import Piece
from hsstream.audit.explain import shifted
from hsstream.audit.judge import Fit
from hsstream.audit.lens import Lens
from hsstream.audit.report import Figures, Finding, Report
from hsstream.errors import SampleError
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo

#: Less than this gained, in nats a token, and nothing is predicted.
LEAST_GAIN = 1.0
#: Arbitrary tokens that gains are measured against.
POOL = 256
#: Bounds of `by_position`.
POSITIONS = (16, 64, 256, 1024, 4096)
#: Sources that get a line of their own.
SOURCES = 20


class Fits:
    """The head's judgement of some samples. tokens: rows of each that are read. findings, notes: of all
    samples together, where the model itself does not know better."""

    def __init__(self, reader: ShardReader, lens: Lens, report: Report, tokens: int) -> None:
        self._reader, self._lens, self._report, self._tokens = reader, lens, report, tokens
        self._normed = True
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def run(self, numbers: Sequence[int], progress: Callable[[int], None]) -> dict[str, Finding]:
        """Fill in the report's figures. Out: a finding for every suspected sample, by its key."""
        found = [choose.pieces(self._reader, number, self._tokens) for number in numbers]
        pieces = [piece for both in found for piece in both]
        choose.mark_own(pieces)
        pieces = [choose.stored(piece) for piece in pieces]
        self._norm(pieces)
        fits = self._fits(pieces, progress)
        self._count(fits)
        return self._judge(fits)

    def _norm(self, pieces: Sequence[Piece]) -> None:
        facts = self._reader.index.info.model or ModelInfo()
        declared = facts.last_hidden_norm or "unknown"
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
            self.findings.append(Finding("norm", message))

    def _states(self, piece: Piece) -> torch.Tensor:
        """After the norm."""
        return piece.last if self._normed else self._lens.normed(piece.last)

    def _fits(self, pieces: Sequence[Piece], progress: Callable[[int], None]) -> list[Fit]:
        self._pool = _pool(pieces, self._lens.vocabulary)
        fits, keys = [], dict.fromkeys(piece.key for piece in pieces)
        for piece in pieces:
            if len(piece.places):
                fits.append(judge.fit(self._lens, piece, self._states(piece), self._pool))
            progress(list(keys).index(piece.key) + 1)
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

    def _judge(self, fits: Sequence[Fit]) -> dict[str, Finding]:
        usual = judge.typical(fits)
        if usual < LEAST_GAIN:
            self.notes.append(
                f"the states predict the tokens after them no better than any others ({usual:.2f} nats): "
                "nobody can predict them, or the states are of another model, of other tokens, or of a layer "
                "far from the last"
            )
            return {}
        by_key: dict[str, list[Fit]] = {}
        for each in fits:
            if judge.is_suspect(each, usual):
                by_key.setdefault(each.piece.key, []).append(each)
        others = list({each.piece.key: each.piece for each in fits}.values())
        found = {}
        for key, suspects in by_key.items():
            # Two pieces of one sample have one cause; what is known surest says which.
            causes = [self._cause(each, others, usual) for each in suspects]
            found[key] = Finding(*max(causes)[1:], (key,))
        return found

    def _cause(self, each: Fit, others: Sequence[Piece], usual: float) -> tuple[float, str, str]:
        """(how sure, kind, message) for a piece whose states do not belong to its tokens."""
        least = judge.EXPLAINED * usual
        name, gain = judge.owner(self._lens, each, self._states(each.piece), others, self._pool)
        if each.shifted >= max(least, gain):
            kind, text = shifted(each.shift)
            return each.shifted, kind, f"states are {text}"
        if gain >= least:
            return gain, "request", f"states belong to the tokens of {name}"
        return float("-inf"), "request", "states do not belong to their tokens"


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
