"""One sample on its way from a source into a writer.

In: a file and an item of a source. Out: a `Prepared` sample, its last hidden state after the final norm
where that is asked for, fp8 codes carried over as they are. Refused, each by name: what the source and the
writer refuse; a last hidden state of which nobody says whether the norm has been applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from hsstream.codecs import parse_codec
from hsstream.codecs.fp8 import Fp8
from hsstream.encoding import PlainTensor, plain_from_codes
from hsstream.errors import HsStreamError, SampleError, SourceError
from hsstream.norm import FinalNorm
from hsstream.packing.facts import facts_beside
from hsstream.packing.job import Job
from hsstream.presets import codec_for
from hsstream.sample import ModelInfo
from hsstream.schema import TensorSpec
from hsstream.sources.base import Item, Loaded, Source, SourceFile
from hsstream.sources.torchfile import BROKEN
from hsstream.writer import Prepared, ShardWriter

LAST, AUX = "last_hidden_state", "aux_hidden_states"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Converted:
    """prepared: the encoded sample. padding: rows of padding it came with. dropped: what its file held
    besides."""

    prepared: Prepared
    padding: int
    dropped: tuple[str, ...]


class Converter:
    """Loads, converts and encodes samples of one source; `prepare` is safe in several threads."""

    def __init__(self, source: Source, job: Job) -> None:
        self._source, self._job = source, job
        self._norm = FinalNorm(job.to_post_norm) if job.to_post_norm is not None else None

    def load(self, file: SourceFile, item: Item) -> Loaded:
        """The sample as the source has it; whatever goes wrong is an HsStreamError."""
        return _typed(lambda: self._source.load(file, item))

    def tokens(self, file: SourceFile, item: Item) -> torch.Tensor | None:
        """The ids of the sample as they are stored; whatever goes wrong is an HsStreamError."""
        return _typed(lambda: self._source.tokens(file, item))

    def model(self, first: Loaded, there: ModelInfo | None) -> ModelInfo:
        """Model facts: what the source says, what the user says, and what the first sample shows.

        there: of a data set that is continued; what nobody says now is as it was.
        """
        self._check_effect(first)
        facts = _merged(self._source.facts(), self._job.facts)
        shown, given = _widths(first), self._job.options.hidden_size
        if given is not None:
            facts = _merged(facts, {"hidden_size": given})
        for name, value in shown.items():
            if facts.setdefault(name, value) != value:
                raise SampleError(
                    f"{name} is {facts[name]} by the source or the options, {value} in its files"
                )
        facts = (self._beside(facts, first) if there is None else there.to_dict()) | facts
        if (ids := facts.get("aux_layer_ids")) is not None:
            _check_layers(ids, first)
            facts.setdefault("layer_id_convention", self._source.convention)
        if LAST in first.tensors:
            facts["last_hidden_norm"] = self._final_norm(first)
        return ModelInfo(**facts)

    def _beside(self, facts: Mapping[str, Any], first: Loaded) -> dict[str, Any]:
        """What lies beside the files, or in the model's own folder where that is named."""
        folders = [Path(facts["name"])] if "name" in facts else []
        if self._job.to_post_norm is not None:
            folders.append(self._job.to_post_norm)
        captured = first.tensors[AUX].shape[1] if AUX in first.tensors else 0
        return facts_beside(self._source.root, folders, facts, captured)

    def _check_effect(self, first: Loaded) -> None:
        """Refuse options that change nothing for a sample like the first."""
        job, options = self._job, self._job.said
        last, aux = LAST in first.tensors, AUX in first.tensors
        without = {
            "--last-norm": options.last_norm is not None and not last,
            "--to-post-norm": job.to_post_norm is not None and not last,
            "--teacher": job.teacher is not None and not last,
            "--layers": options.layers is not None and not aux,
            "--layer-convention": "layer_id_convention" in job.facts
            and not {"aux_layer_ids"} & (job.facts.keys() | self._source.facts().keys()),
        }
        for name, idle in without.items():
            if idle:
                raise SampleError(f"{name} has no effect on these files: {', '.join(first.tensors)}")

    def prepare(self, writer: ShardWriter, file: SourceFile, item: Item, norm: str | None) -> Converted:
        """One sample, encoded. norm: of the data set."""
        loaded = self.load(file, item)

        def encode() -> Prepared:
            tensors, ready = self._normed(loaded, norm), self._ready(loaded)
            meta = {**loaded.meta, "source": item.origin}
            return writer.prepare(item.key, tensors, loaded.attention_mask, meta, ready)

        prepared = _typed(encode)
        rows = max(len(value) for value in loaded.tensors.values())
        return Converted(prepared, loaded.padding + rows - prepared.plain.tokens, loaded.dropped)

    def _final_norm(self, first: Loaded) -> str:
        """`last_hidden_norm` of the data set."""
        norm = self._source.norm_of(first)
        if norm is None:
            raise SampleError(
                f"{self._source.format} files do not say whether their last hidden state was captured before "
                "or after the model's final norm: give --last-norm pre or --last-norm post"
            )
        if self._norm is None:
            return norm
        if norm == "post" and first.norm is None:
            raise SampleError(
                "--to-post-norm: the last hidden states of this source are after the norm already"
            )
        return "post"

    def _normed(self, loaded: Loaded, wanted: str | None) -> Mapping[str, torch.Tensor]:
        if LAST not in loaded.tensors:
            return loaded.tensors
        found = self._source.norm_of(loaded)
        if found == wanted:
            return loaded.tensors
        if found == "pre" and self._norm is not None:
            loaded.codes.pop(LAST, None)
            return {**loaded.tensors, LAST: self._norm(loaded.tensors[LAST])}
        raise SourceError(
            f"last_hidden_state is {found}-norm, the data set {wanted}-norm"
            + (": a norm cannot be undone" if found == "post" else "")
        )

    def _ready(self, loaded: Loaded) -> dict[str, PlainTensor]:
        """The codes that came with the sample, where the writer wants that codec."""
        ready = {}
        for name, members in loaded.codes.items():
            if parse_codec(codec_for(name, self._job.codec)).name == Fp8.name:
                value = loaded.tensors[name]
                spec = TensorSpec(name, value.dtype, tuple(value.shape[1:]), Fp8(), "none")
                ready[name] = plain_from_codes(spec, members)
        return ready


def _typed(work: Callable[[], Result]) -> Result:
    """What `work` gives; what the libraries below raise becomes a SourceError."""
    try:
        return work()
    except HsStreamError:
        raise
    except BROKEN as error:
        raise SourceError(f"cannot be taken over: {type(error).__name__}: {str(error)[:160]}") from error


def _merged(source: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    facts = dict(source)
    for name, value in given.items():
        if facts.setdefault(name, value) != value:
            raise SampleError(f"{name} is {facts[name]!r} by the source, {value!r} by the options")
    return facts


def _widths(first: Loaded) -> dict[str, int]:
    for name in (LAST, AUX):
        if name in first.tensors:
            return {"hidden_size": first.tensors[name].shape[-1]}
    return {}


def _check_layers(ids: Any, first: Loaded) -> None:
    aux = first.tensors.get(AUX)
    found = 0 if aux is None else aux.shape[1]
    if len(ids) != found:
        raise SampleError(f"{len(ids)} layer ids are given, the files hold {found} captured layers")
