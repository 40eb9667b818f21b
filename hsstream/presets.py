"""Presets: codecs chosen together, by what they are for. The figures are in README and DESIGN.md.

In: the `codec` argument of a writer: a preset, a codec, or a map by tensor name. Out: the codec of each
tensor. Refused: what `parse_codec` refuses.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def codec_for(name: str, codec: str | Mapping[str, str]) -> str:
    """The codec of tensor `name`; what is no hidden state is `raw` unless a map says otherwise."""
    if name not in HIDDEN_STATES:
        return codec.get(name, "raw") if isinstance(codec, Mapping) else "raw"
    chosen = codec.get(name, "fp8") if isinstance(codec, Mapping) else codec
    return PRESETS[chosen][HIDDEN_STATES.index(name)] if chosen in PRESETS else chosen
