"""The stored states of some samples against the model itself.

In: a reader, a loaded model, numbers of samples. Out: `Gathered`: for each state and sample how it differs,
and why. Refused with SampleError: what the model refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hsstream.audit import compare, explain, probe
from hsstream.audit.choose import zero_states
from hsstream.audit.compare import Rows
from hsstream.audit.explain import Cause
from hsstream.audit.lens import Lens
from hsstream.audit.report import Figures
from hsstream.model_info import layer_outputs
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo, Sample
from hsstream.trainers.base import AUX, HF_INDEX, IDS, LAST

TOPK = ("target_topk_ids", "target_topk_logits", "target_logsumexp")
#: Rows of each state that are kept to recognise it in another sample.
KEPT = 64


@dataclass(frozen=True)
class State:
    """A stored state: its name for people, its place on the layer axis (None: no such axis), and the places
    of the model (see `Outputs.at`) that it may be; none where the data set does not say."""

    name: str
    layer: int | None
    places: tuple[int, ...]


@dataclass
class Seen:
    """One state of one sample. place: what it was compared with; table: [L + 2], its error at every place."""

    key: str
    rows: Rows
    place: int
    table: torch.Tensor
    cause: Cause | None = None


@dataclass
class Gathered:
    """Everything that samples showed.

    layers: L; seen, first: for each state, of every sample, and the model's own first rows by key; zeros:
    names of its states with rows of zeros, by key; cut: keys of samples of which only the beginning was
    compared; beyond: facts that this model cannot have; own, stored: figures of the model's states, as the
    codec gives them back, and of the stored ones, on the same tokens; more_nats: the difference, a token;
    teacher: (key, distance in nats) of samples whose sparse teacher is wrong.
    """

    layers: int
    states: list[State]
    keys: list[str] = field(default_factory=list)
    tokens: int = 0
    seen: list[list[Seen]] = field(default_factory=list)
    first: list[dict[str, torch.Tensor]] = field(default_factory=list)
    zeros: dict[str, list[str]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    beyond: list[str] = field(default_factory=list)
    own: Figures = field(default_factory=Figures)
    stored: Figures = field(default_factory=Figures)
    more_nats: list[torch.Tensor] = field(default_factory=list)
    teacher: list[tuple[str, float]] = field(default_factory=list)


class Comparison:
    """Compares samples one by one."""

    def __init__(self, reader: ShardReader, model: probe.Model, lens: Lens) -> None:
        self._reader, self._model, self._lens = reader, model, lens
        self._info = reader.index.info
        self._facts = self._info.model or ModelInfo()
        self._norm = None if lens.norm is None else lens.normed
        self._specs = self._info.schema.by_name
        self.states = list(self._declared())
        self.found = Gathered(model.layers, self.states)
        self.found.seen = [[] for _ in self.states]
        self.found.first = [{} for _ in self.states]
        self.found.beyond = list(self._beyond())

    def _beyond(self) -> Iterator[str]:
        """Facts of another model."""
        layers, said = self._model.layers, self._facts.num_layers
        if said is not None and said != layers:
            yield f"the data set is said to be of a model of {said} layers, this one has {layers}"
        for state, layer in zip(self.states, self._facts.aux_layer_ids or (), strict=False):
            if state.layer is not None and not self._aux_places(layer, None):
                yield f"{state.name} is said to be layer {layer}, the model has {layers}"

    def _declared(self) -> Iterator[State]:
        """Every stored state of a token, the last one last."""
        layers = self._model.layers
        spec, norms = self._specs.get(AUX), self._facts.aux_hidden_norm or ()
        count = (spec.layers or 0) if spec is not None else 0
        ids = self._facts.aux_layer_ids
        if ids is not None and len(ids) != count:
            ids = None
        for number in range(count):
            norm = norms[number] if number < len(norms) else None
            places = () if ids is None else self._aux_places(ids[number], norm)
            yield State(f"{AUX}[{number}]", number, places)
        if LAST in self._specs:
            norm = self._facts.last_hidden_norm
            known = {"pre": (layers,), "post": (layers + 1,)}
            yield State(LAST, None, known.get(norm or "", (layers, layers + 1)))

    def _aux_places(self, layer: int, norm: str | None) -> tuple[int, ...]:
        """What a captured layer of this id may be: by both conventions where none is recorded, and, of the
        last one, before or after the norm where that is not recorded."""
        layers, convention = self._model.layers, self._facts.layer_id_convention
        conventions = (convention,) if convention else ("", HF_INDEX)
        places = {layer_outputs((layer,), each)[0] + 1 for each in conventions}
        found = sorted(place for place in places if 0 <= place <= layers)
        if layers in found and norm == "post":
            found[-1] = layers + 1
        elif layers in found and norm != "pre":
            found.append(layers + 1)
        return tuple(found)

    # -- one sample ------------------------------------------------------------------------------

    def add(self, number: int) -> None:
        """Compare one sample."""
        sample = self._reader.read(number, slice(0, self._model.max_tokens))
        ids = sample.tensors[IDS]
        own = self._model.outputs(ids)
        rounded = self._model.rounded(ids)
        self.found.keys.append(sample.key)
        self.found.tokens += len(ids)
        self.found.zeros[sample.key] = zero_states(sample, self._info)
        if self._reader.index.table.tokens[number] > len(ids):
            self.found.cut.add(sample.key)
        stored = [self._stored(sample, state) for state in self.states]
        tables = [
            compare.by_place(values, own, rows, None if state.layer is not None else self._norm)
            for state, (values, rows) in zip(self.states, stored, strict=True)
        ]
        places = [self._place(state, table) for state, table in zip(self.states, tables, strict=True)]
        coded = self._coded(own, places)
        for each in range(len(self.states)):
            values, rows = stored[each]
            reference = own.at(places[each])[rows]
            noise = self._model.slack * probe.difference(rounded.at(places[each])[rows], reference)
            found = compare.compare(values, reference, coded[each][rows], noise, rows)
            self._note(each, Seen(sample.key, found, places[each], tables[each]), own)
            self.found.first[each][sample.key] = own.at(places[each])[:KEPT].bfloat16()
        if self.states and self.states[-1].layer is None:
            self._cross_entropy(ids, stored[-1], coded[-1], places[-1])
        if all(name in self._specs for name in TOPK):
            self._check_teacher(sample, own.last, rounded.last)

    def _stored(self, sample: Sample, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows that are stored [n, H], where they stand [n]); rows of zeros are judged elsewhere."""
        values = sample.tensors[LAST] if state.layer is None else sample.tensors[AUX][:, state.layer]
        rows = torch.nonzero((values != 0).any(dim=1)).flatten()
        return values[rows].float(), rows

    def _place(self, state: State, table: torch.Tensor) -> int:
        """The closest of those that it may be."""
        choice = list(state.places) or list(range(len(table)))
        return choice[int(table[choice].argmin())]

    def _coded(self, own: probe.Outputs, places: Sequence[int]) -> list[torch.Tensor]:
        """The model's states as the data set's codecs give them back, one [S, H] a state."""
        by_name: dict[str, torch.Tensor] = {}
        aux = [place for state, place in zip(self.states, places, strict=True) if state.layer is not None]
        if aux:
            by_name[AUX] = torch.stack([own.at(place) for place in aux], dim=1)
        if LAST in self._specs:
            by_name[LAST] = own.at(places[-1])
        found = compare.coded(by_name, [self._specs[name] for name in by_name])
        return [found[LAST] if s.layer is None else found[AUX][:, s.layer] for s in self.states]

    def _note(self, number: int, seen: Seen, own: probe.Outputs) -> None:
        rows = seen.rows
        if bool(rows.wrong.all()) and len(rows.rows):
            seen.cause = explain.whole(rows, own, seen.place, seen.table, self._norm)
        elif bool(rows.wrong.any()):
            seen.cause = explain.part(rows)
        seen.rows.own = rows.own[:0]
        seen.rows.stored = rows.stored[:KEPT]
        self.found.seen[number].append(seen)

    def _cross_entropy(
        self, ids: torch.Tensor, stored: tuple[torch.Tensor, torch.Tensor], coded: torch.Tensor, place: int
    ) -> None:
        """Of the stored states, and of the model's own as the codec gives them back, on the same tokens."""
        states, rows = stored
        states, rows = states[rows + 1 < len(ids)], rows[rows + 1 < len(ids)]
        if len(rows) == 0 or (place <= self._model.layers and self._lens.norm is None):
            return
        nats = []
        for values, figures in ((states, self.found.stored), (coded[rows], self.found.own)):
            normed = values if place > self._model.layers else self._lens.normed(values)
            logprobs, first = self._lens.next_token(normed, ids[rows + 1])
            figures.add(len(rows), float(-logprobs.sum()), int((first == ids[rows + 1]).sum()))
            nats.append(-logprobs)
        self.found.more_nats.append(nats[0] - nats[1])

    def _check_teacher(self, sample: Sample, last: torch.Tensor, rounded: torch.Tensor) -> None:
        """The log-probabilities of a sparse teacher against the model's own."""
        ids, logits, total = (sample.tensors[name] for name in TOPK)
        own, other = (self._lens.at(states, ids) for states in (last, rounded))
        exact = own[0] - own[1][:, None]
        found = logits.float() - total.float()[:, None]
        # A head in bfloat16 rounds its logits before they are stored.
        coded = own[0].bfloat16().to(logits.dtype).float() - own[1][:, None]

        def distance(values: torch.Tensor) -> torch.Tensor:
            return (values - exact).square().mean(dim=1).sqrt()

        noise = self._model.slack * distance(other[0] - other[1][:, None])
        ones = torch.ones(len(ids))
        wrong = compare.wrong_rows(distance(found), distance(coded), noise, ones)
        if bool(wrong.any()):
            self.found.teacher.append((sample.key, float(distance(found)[wrong].median())))
