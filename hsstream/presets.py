"""Presets: codecs chosen together, by what they are for. The figures are in README and DESIGN.md.

In: the `codec` argument of a writer: a preset, a codec, or a map by tensor name. Out: the codec of each
tensor. Refused: what `parse_codec` refuses, with the presets beside the codecs.
"""

from __future__ import annotations

from collections.abc import Mapping

from hsstream.codecs import parse_codec
from hsstream.errors import SampleError
from hsstream.sample import HIDDEN_STATES

#: Preset -> codec of `aux_hidden_states`, codec of `last_hidden_state`. `sparse` stores no last hidden
#: state but the largest logits of the teacher (see `teacher`).
PRESETS: dict[str, tuple[str, str]] = {
    "lossless": ("planes", "planes"),
    "fp8": ("fp8", "fp8"),
    "fine": ("bounded:0.02", "bounded:0.02"),
    "balanced": ("bounded:0.35..0.09", "bounded:0.05"),
    "small": ("bounded:0.5..0.16", "bounded:0.05"),
    "sparse": ("bounded:0.5..0.12", "bounded:0.05"),
}


def check_codec(codec: str | Mapping[str, str]) -> None:
    """Refuse names that are neither a preset nor a codec (SampleError), before there is a tensor to store."""
    for name in codec.values() if isinstance(codec, Mapping) else (codec,):
        if name in PRESETS:
            continue
        try:
            parse_codec(name)
        except SampleError as error:
            raise SampleError(f"{error}, or a preset: {', '.join(PRESETS)}") from None


def codec_text(codec: str | Mapping[str, str]) -> str:
    """A `codec` argument as the command line takes it: `small`, `aux=fp8,last=bounded:0.05`."""
    if isinstance(codec, str):
        return codec
    return ",".join(f"{name.partition('_hidden_state')[0]}={chosen}" for name, chosen in codec.items())


def codec_for(name: str, codec: str | Mapping[str, str]) -> str:
    """The codec of tensor `name`; what is no hidden state is `raw` unless a map says otherwise."""
    if name not in HIDDEN_STATES:
        return codec.get(name, "raw") if isinstance(codec, Mapping) else "raw"
    chosen = codec.get(name, "fp8") if isinstance(codec, Mapping) else codec
    return PRESETS[chosen][HIDDEN_STATES.index(name)] if chosen in PRESETS else chosen
