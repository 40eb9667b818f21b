"""An estimate from bare numbers, by the ratios of real states of another model.

In: hidden size, vectors a token, tokens. Out: an `Estimate` without errors and speeds. Refused with
SampleError: numbers below 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from hsstream.codecs import parse_codec
from hsstream.errors import SampleError
from hsstream.estimate.result import Estimate, Rung
from hsstream.presets import PRESETS, check_codec, codec_for, codec_text
from hsstream.sample import HIDDEN_STATES

#: Bytes of bf16 at 2,880 values a vector, by tools/sizes.py: captured layers, last state.
REFERENCE = {
    "raw": (1.0, 1.0),
    "planes": (0.683, 0.677),
    "fp8": (0.501, 0.501),
    "fp8, zstd": (0.428, 0.422),
}
#: The same of codec `bounded`, by its error; in between they are taken to be linear in its logarithm.
BOUNDED = {
    0.02: (0.333, 0.323),
    0.05: (0.251, 0.239),
    0.09: (0.2, 0.188),
    0.17: (0.143, 0.133),
    0.25: (0.11, 0.103),
    0.35: (0.087, 0.08),
    0.5: (0.067, 0.058),
}
#: Codecs shown beside the presets.
CODECS = ("fp8, zstd", "bounded:0.05", "bounded:0.17", "bounded:0.25")
TOP_K = 64
#: Stored bytes a token of ids, masks, headers and index, and of a top-k teacher, beside the states.
PLAIN_TOKEN_BYTES = 5.0
TOP_K_BYTES = 220.0


def from_numbers(
    hidden: int, vectors: int, tokens: int, codecs: Iterable[str | Mapping[str, str]] = ()
) -> Estimate:
    """An estimate from bare numbers, by the ratios of real states of another model.

    hidden: values of a vector; vectors: captured layers and the last state together, a token. codecs: shown
    beside the presets.
    """
    if min(hidden, vectors, tokens) < 1:
        raise SampleError(f"hidden, vectors and tokens must be positive, got {hidden}, {vectors}, {tokens}")
    vector = 2.0 * hidden
    chosen = {**PRESETS, **{name: (name, name) for name in CODECS}}
    for own in codecs:
        check_codec(own)
        aux, last = (codec_for(name, own) for name in HIDDEN_STATES)
        chosen.setdefault(codec_text(own), (aux, last))
    rungs = []
    for name, (aux, last) in chosen.items():
        teacher = TOP_K_BYTES if name == "sparse" else vector * _ratio(last, 1)
        layers = sum(_ratio(aux, 0, layer, vectors - 1) for layer in range(vectors - 1))
        nbytes = vector * layers + teacher + PLAIN_TOKEN_BYTES
        rungs.append(Rung(name, nbytes, nbytes / (vector * vectors)))
    basis = "reference ratios, measured on SmolLM2-135M"
    return Estimate(basis, tokens, vector * vectors, rungs)


def _ratio(codec: str, column: int, layer: int = 0, layers: int = 1) -> float:
    """Bytes of bf16 of one captured layer (column 0) or of the last state (1)."""
    if codec in REFERENCE:
        return REFERENCE[codec][column]
    own = parse_codec(codec).of_layer(layer, layers).params()["error"]
    ratios = [pair[column] for pair in BOUNDED.values()]
    return float(np.interp(math.log(float(own)), np.log(list(BOUNDED)), ratios))
