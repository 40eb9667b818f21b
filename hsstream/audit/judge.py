"""One sample: do its states predict its tokens, and if not, which tokens do they predict?

In: log-probabilities of a sample's tokens at its rows. Out: `Fit`: what is gained over tokens drawn from
the data at large, where they stand and at every shift; the other sample that states belong to. Nothing is
refused.

A *gain* is in nats a token: log-probability of the tokens that follow, less that of arbitrary tokens of the
same data. States of other tokens gain about nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hsstream.audit.choose import Piece
from hsstream.audit.lens import Lens

#: Fewer rows than this say nothing of a shift.
FEWEST_ROWS = 24
#: Below this share of what is typical, a sample is suspect; another place explains it from `EXPLAINED` on.
SUSPECT, EXPLAINED = 0.25, 0.5
#: Standard errors that are taken off a gain before it counts: many places are tried.
CAUTION = 4.0


@dataclass
class Fit:
    """One piece. tokens: rows with a next token; nats_of, right: [tokens], its cross-entropy, and whether it
    is the first choice. judged: rows whose tokens are the sample's own; gain: over these, where they stand;
    sure: the same, but for chance; shift, shifted: the best other place and what is surely gained there, 0
    and -inf where none has enough rows; more: what is surely gained there over where they stand, on the same
    rows."""

    piece: Piece
    tokens: int
    nats_of: torch.Tensor
    right: torch.Tensor
    judged: torch.Tensor
    gain: float
    sure: float
    shift: int
    shifted: float
    more: float

    @property
    def best(self) -> float:
        """What is surely gained at the best place."""
        return max(self.sure, self.shifted)


def fit(lens: Lens, piece: Piece, states: torch.Tensor, pool: torch.Tensor) -> Fit:
    """Judge the rows of a piece. states: after the norm; pool: arbitrary tokens of the data [m]."""
    length = len(piece.ids)
    found, first = lens.logprobs(states, torch.cat([piece.ids, pool]))
    own, base = found[:, :length], found[:, length:].mean(dim=1)
    has_next = piece.places + 1 < length
    rows, places = torch.nonzero(has_next).flatten(), piece.places[has_next] + 1
    logprob = own[rows, places]
    judged = _own_rows(piece)
    gains = (logprob - base[rows])[judged[rows]]
    shift, shifted, more = _best_shift((own - base[:, None])[judged], piece.places[judged])
    right = first[rows] == piece.ids[places]
    return Fit(piece, len(rows), -logprob, right, judged, _mean(gains), _surely(gains), shift, shifted, more)


def _own_rows(piece: Piece) -> torch.Tensor:
    """bool [n]: rows behind what the sample has in common with others; all where too few are left."""
    kept = piece.places + 1 >= piece.own
    return kept if int(kept.sum()) >= FEWEST_ROWS else torch.ones_like(kept)


def _mean(gains: torch.Tensor) -> float:
    return float(gains.mean()) if len(gains) else 0.0


def _surely(gains: torch.Tensor) -> float:
    """Their mean, less CAUTION times its standard error; -inf for fewer than two."""
    if len(gains) < 2:
        return float("-inf")
    return float(gains.mean() - CAUTION * gains.std() / len(gains) ** 0.5)


def _best_shift(gains: torch.Tensor, places: torch.Tensor) -> tuple[int, float, float]:
    """(d, sure gain, what is surely gained over d = 0): where row t predicts the token at t + 1 + d best, d
    not 0. gains: [n, S]."""
    length, best = gains.shape[1], (0, float("-inf"))
    if len(places) < FEWEST_ROWS:
        return *best, float("-inf")
    rows = torch.arange(len(places))
    for shift in range(-int(places[-1]), length - 1 - int(places[0])):
        wanted = places + 1 + shift
        inside = (wanted >= 0) & (wanted < length)
        if shift == 0 or int(inside.sum()) < FEWEST_ROWS:
            continue
        gain = _surely(gains[rows[inside], wanted[inside]])
        if gain > best[1]:
            best = (shift, gain)
    wanted = places + 1 + best[0]
    both = (wanted >= 0) & (wanted < length) & (places + 1 < length)
    here, there = gains[rows[both], places[both] + 1], gains[rows[both], wanted[both]]
    return *best, _surely(there - here)


def typical(fits: Sequence[Fit]) -> float:
    """The median over samples of what is surely gained, at the best place of the better piece."""
    best: dict[str, float] = {}
    for each in fits:
        best[each.piece.key] = max(each.best, best.get(each.piece.key, float("-inf")))
    return float(torch.tensor(list(best.values())).median()) if best else 0.0


def is_suspect(each: Fit, usual: float) -> bool:
    """Whether a piece's states do not belong to its tokens: nothing is gained, or surely more at another
    place, where as much is gained as is usual."""
    if each.tokens < FEWEST_ROWS or int(each.judged.sum()) < FEWEST_ROWS:
        return False
    return each.gain < SUSPECT * usual or (each.more > 0 and each.shifted >= EXPLAINED * usual)


def owner(
    lens: Lens, each: Fit, states: torch.Tensor, others: Sequence[Piece], pool: torch.Tensor
) -> tuple[str, float]:
    """(the sample whose tokens these states predict best, what is surely gained there)."""
    states, places = states[each.judged], each.piece.places[each.judged]
    # Rows stand in ascending places: those that the other sample reaches are the first ones.
    tokens = [other.ids[places[places + 1 < len(other.ids)] + 1] for other in others]
    found, _ = lens.logprobs(states, torch.cat([*tokens, pool]))
    base, best, start = found[:, -len(pool) :].mean(dim=1), ("", float("-inf")), 0
    for other, wanted in zip(others, tokens, strict=True):
        count = len(wanted)
        gains = found[:count, start : start + count].diagonal() - base[:count]
        start += count
        if other.key != each.piece.key and count >= FEWEST_ROWS and _surely(gains) > best[1]:
            best = (other.key, _surely(gains))
    return best
