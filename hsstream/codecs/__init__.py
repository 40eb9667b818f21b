"""Values <-> codes: a closed, versioned table of codecs. No I/O, no compression.

In: rows of one member, a contiguous tensor [R, V, H] (R token rows, V vectors a row, H values a
vector). Out: a `Codes` of uint8 codes [R, row_bytes], one float32 scale per row and vector for
the scaled codecs, and the codec's extra bytes. Refused: dtypes the codec cannot hold
(`SampleError`), codes that no encoder writes (`CorruptDataError`, reason `bad_code`).

============ =========================================== =================== ===================
codec        stored                                      bytes of bf16       default compression
============ =========================================== =================== ===================
raw          the exact bytes of any dtype                1                   lz4
planes       16-bit floats, exact, in two byte planes    0.69 with zstd      zstd
fp8          e4m3fn codes, power-of-two scale a vector   0.50                lz4
bounded:E    4- or 8-bit codes, exact escapes            0.34 at 0.02 zstd   zstd
                                                         0.14 at 0.16 zstd
============ =========================================== =================== ===================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hsstream.codecs.base import Codec, Codes, EscapeSink, Part, RowWriter, ScaledCodec
from hsstream.codecs.bounded import Bounded
from hsstream.codecs.exact import Planes, Raw
from hsstream.codecs.fp8 import Fp8
from hsstream.errors import FormatError, SampleError, UnsupportedVersionError

__all__ = [
    "CODECS",
    "Codec",
    "Codes",
    "EscapeSink",
    "Part",
    "RowWriter",
    "ScaledCodec",
    "codec_from_header",
    "parse_codec",
]

_Maker = Callable[[Mapping[str, object]], Codec]
#: The closed table of format version 1.0: name -> its parameters, and how a codec is made from them.
CODECS: dict[str, tuple[frozenset[str], _Maker]] = {
    "raw": (frozenset(), lambda _: Raw()),
    "planes": (frozenset(), lambda _: Planes()),
    "fp8": (frozenset(), lambda _: Fp8()),
    "bounded": (frozenset({"error", "first", "packed", "size"}), Bounded.from_header),
}
_CHOICES = '"raw", "planes", "fp8", "bounded:ERROR" or "bounded:FIRST..LAST" with errors in (0, 1]'


def parse_codec(spec: str) -> Codec:
    """The codec a user names: `raw`, `planes`, `fp8`, `bounded:ERROR` such as `bounded:0.16`, or
    `bounded:FIRST..LAST` such as `bounded:0.3..0.1`, errors of the first and the last captured layer.

    Raises SampleError naming the choices.
    """
    if not isinstance(spec, str):
        raise SampleError(f"codec must be a string, one of {_CHOICES}; found {type(spec).__name__}")
    name, colon, argument = spec.partition(":")
    if name == "bounded" and colon:
        return Bounded.parse(argument)
    if spec not in CODECS or spec == "bounded":
        raise SampleError(f"unknown codec {spec!r}: choose one of {_CHOICES}")
    return CODECS[spec][1]({})


def codec_from_header(name: str, params: Mapping[str, object]) -> Codec:
    """The codec a header names, from untrusted fields.

    Raises FormatError (bad_field) for a field of the wrong type or value and UnsupportedVersionError
    (unknown_feature) for a codec or a parameter this version does not know.
    """
    if not isinstance(name, str) or not isinstance(params, Mapping):
        raise FormatError("a codec is a name and a map of parameters", reason="bad_field")
    if name not in CODECS:
        known = ", ".join(CODECS)
        raise UnsupportedVersionError(
            f"codec {name!r} is not one of {known}: read it with a newer hsstream", reason="unknown_feature"
        )
    known_params, make = CODECS[name]
    unknown = sorted(str(key) for key in params if key not in known_params)
    if unknown:
        raise UnsupportedVersionError(
            f"codec {name} has unknown parameters {unknown}: read it with a newer hsstream",
            reason="unknown_feature",
        )
    return make(params)
