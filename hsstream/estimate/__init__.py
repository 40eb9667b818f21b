"""What a data set will take on disk, and what each codec does to the states, before a byte is stored.

In: samples of the user's own states (from a data set, from files of any program that `sources` knows, or
from a model that runs for a minute), or bare numbers. Out: an `Estimate`: for every preset and codec bytes
a token, total, ratio to bf16, relative error of each layer, what the teacher loses, speed here, what fits.
Refused with SampleError: no sample, none with hidden states, an lm_head of another width.

`result` says what an estimate is, `numbers` makes one from bare numbers, `measure` from samples; `draw` and
`model` are where samples come from.
"""

from __future__ import annotations

from hsstream.estimate.draw import Drawn, draw_root, draw_source
from hsstream.estimate.measure import Case, Teacher, from_samples
from hsstream.estimate.model import run_model
from hsstream.estimate.numbers import from_numbers
from hsstream.estimate.result import Estimate, Rung

__all__ = [
    "Case",
    "Drawn",
    "Estimate",
    "Rung",
    "Teacher",
    "draw_root",
    "draw_source",
    "from_numbers",
    "from_samples",
    "run_model",
]
