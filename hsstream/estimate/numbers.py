"""An estimate from bare numbers, by the ratios of real states of another model.

In: hidden size, vectors a token, tokens. Out: an `Estimate` without errors and speeds. Refused with
SampleError: numbers below 1.
"""

from __future__ import annotations

from hsstream.errors import SampleError
from hsstream.estimate.result import Estimate, Rung
from hsstream.presets import PRESETS

#: Bytes of bf16 by codec, at 2,880 values a vector drawn from real states as tools/sizes.py does it:
#: captured layers, last state.
REFERENCE = {
    "planes": (0.688, 0.681),
    "fp8": (0.501, 0.501),
    "fp8, zstd": (0.428, 0.422),
    "bounded:0.02": (0.334, 0.323),
    "bounded:0.05": (0.251, 0.239),
    "bounded:0.17": (0.143, 0.133),
    "bounded:0.25": (0.111, 0.103),
}
#: Codecs shown beside the presets.
CODECS = ("fp8, zstd", "bounded:0.05", "bounded:0.17", "bounded:0.25")
TOP_K = 64
#: Stored bytes a token of ids, masks, headers and index, and of a top-k teacher, beside the states.
PLAIN_TOKEN_BYTES = 5.0
TOP_K_BYTES = 220.0


def from_numbers(hidden: int, vectors: int, tokens: int) -> Estimate:
    """An estimate from bare numbers, by the ratios of real states of another model.

    hidden: values of a vector; vectors: captured layers and the last state together, a token.
    """
    if min(hidden, vectors, tokens) < 1:
        raise SampleError(f"hidden, vectors and tokens must be positive, got {hidden}, {vectors}, {tokens}")
    vector = 2.0 * hidden
    chosen = {**PRESETS, **{name: (name, name) for name in CODECS}}
    rungs = []
    for name, (aux, last) in chosen.items():
        teacher = TOP_K_BYTES if name == "sparse" else vector * REFERENCE[last][1]
        nbytes = vector * (vectors - 1) * REFERENCE[aux][0] + teacher + PLAIN_TOKEN_BYTES
        rungs.append(Rung(name, nbytes, nbytes / (vector * vectors)))
    basis = "reference ratios, measured on SmolLM2-135M"
    return Estimate(basis, tokens, vector * vectors, rungs)
