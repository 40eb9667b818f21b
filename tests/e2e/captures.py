"""Captures of a language model, right ones and wrong ones: what an audit has to tell apart."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import hsstream as hs
from hsstream.norm import FinalNorm

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "tools") not in sys.path:
    sys.path.insert(0, str(ROOT / "tools"))

from extraction.masks import tokenize_chat  # noqa: E402

Tensors = dict[str, torch.Tensor]
Made = dict[str, Tensors]
AUX, LAST, IDS, MASK = "aux_hidden_states", "last_hidden_state", "input_ids", "loss_mask"


@dataclass
class Capture:
    """A model, its folder, chats and the states that are right for them, bfloat16."""

    folder: Path
    model: Any
    tokenizer: Any
    layers: tuple[int, ...]
    samples: Made = field(default_factory=dict)

    @property
    def count(self) -> int:
        """L."""
        return int(self.model.config.num_hidden_layers)

    @property
    def facts(self) -> hs.ModelInfo:
        """All that is known."""
        config = self.model.config
        return hs.ModelInfo(
            hidden_size=config.hidden_size,
            num_layers=self.count,
            vocab_size=config.vocab_size,
            aux_layer_ids=self.layers,
            layer_id_convention="layer_output_0based",
            last_hidden_norm="post",
        )

    @property
    def keys(self) -> list[str]:
        """Of the samples."""
        return list(self.samples)

    def add_chat(self, key: str, turns: Sequence[str], length: int, template: str | None = None) -> None:
        """A conversation, cut to so many tokens."""
        tokenizer = self.tokenizer
        if template is not None:
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.chat_template = template
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
        ids, mask = tokenize_chat(tokenizer, messages, key)
        self.add(key, ids[:length], mask[:length])

    def add(self, key: str, ids: Sequence[int], mask: Sequence[bool] | None = None) -> None:
        """A sample and its states."""
        found = torch.tensor(ids)
        supervised = torch.tensor(mask if mask is not None else [True] * len(ids), dtype=torch.uint8)
        self.samples[key] = {IDS: found, MASK: supervised, **self.states(self.places(found))}

    def places(self, ids: torch.Tensor, model: Any = None) -> list[torch.Tensor]:
        """The embedding, the output of every layer, the last state after the norm: L + 2 times [S, H]."""
        model = self.model if model is None else model
        before: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_hook(lambda _m, given, _o: before.append(given[0][0]))
        with torch.inference_mode():
            output = model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
        hook.remove()
        states = [state[0] for state in output.hidden_states]
        return [state.to(torch.bfloat16) for state in (*states[:-1], before[0], states[-1])]

    def states(self, places: Sequence[torch.Tensor], layers: Sequence[int] | None = None) -> Tensors:
        """The tensors of a sample."""
        chosen = [places[layer + 1] for layer in layers or self.layers]
        return {AUX: torch.stack(chosen, 1), LAST: places[-1].clone()}

    def copied(self) -> Made:
        """The right capture, to be spoiled."""
        return {key: dict(tensors) for key, tensors in self.samples.items()}

    def again(self, model: Any) -> Made:
        """States of another model for the same tokens."""
        return {key: each | self.states(self.places(each[IDS], model)) for key, each in self.copied().items()}


def write(
    root: Path, made: Mapping[str, Tensors], facts: hs.ModelInfo, codec: str = "lossless", **more: Any
) -> Path:
    """A data set of them."""
    with hs.ShardWriter(root, model=facts, codec=codec, **more) as writer:
        for key, tensors in made.items():
            writer.write(key, {name: value.contiguous() for name, value in tensors.items()})
    return root


@dataclass(frozen=True)
class Wrong:
    """A wrong capture: what is done, which facts are recorded instead of the right ones, by which codec it is
    stored; and what is found: kinds, the states named, the samples named (numbers; none: all)."""

    spoil: Callable[[Capture], Made]
    kinds: frozenset[str]
    names: str = ""
    samples: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    codec: str = "lossless"

    def recorded(self, capture: Capture) -> hs.ModelInfo:
        """The facts that the data set has."""
        return replace(capture.facts, **self.facts)


def every(
    change: Callable[[Capture, Tensors], Tensors], numbers: Iterable[int] = ()
) -> Callable[[Capture], Made]:
    """A change of all samples, or of some."""
    chosen = set(numbers)

    def spoil(capture: Capture) -> Made:
        made = capture.copied()
        for number, key in enumerate(made):
            if not chosen or number in chosen:
                made[key] = made[key] | change(capture, made[key])
        return made

    return spoil


def aux(number: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Capture, Tensors], Tensors]:
    """One captured layer changed."""

    def changed(_capture: Capture, each: Tensors) -> Tensors:
        states = each[AUX].clone()
        states[:, number] = change(states[:, number])
        return {AUX: states}

    return changed


def last(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Capture, Tensors], Tensors]:
    """The last state changed."""
    return lambda _capture, each: {LAST: change(each[LAST])}


def mask(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Capture, Tensors], Tensors]:
    """The loss mask changed."""
    return lambda _capture, each: {MASK: change(each[MASK])}


def place(number: int) -> Callable[[Capture, Tensors], Tensors]:
    """The last state taken from another place of `Capture.places`."""
    return lambda capture, each: {LAST: capture.places(each[IDS])[number].clone()}


def normed(place: int) -> Callable[[Capture, Tensors], Tensors]:
    """The same, and the norm applied."""

    def changed(capture: Capture, each: Tensors) -> Tensors:
        return {LAST: FinalNorm(capture.folder)(capture.places(each[IDS])[place])}

    return changed


def noisy(share: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(states: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(len(states)))
        size = states.float().square().mean(-1, keepdim=True).sqrt()
        return (states.float() + share * drawn * size).to(states.dtype)

    return change


def by_rms(states: torch.Tensor) -> torch.Tensor:
    return (states.float() / states.float().square().mean(-1, keepdim=True).sqrt()).to(states.dtype)


def zeros(states: torch.Tensor) -> torch.Tensor:
    states = states.clone()
    states[20:84] = 0
    return states


def exchanged(states: torch.Tensor) -> torch.Tensor:
    states, rows = states.clone(), torch.arange(0, len(states), 7)
    states[rows] = states[rows.flip(0)]
    return states


def swapped(first: int, second: int, names: Sequence[str]) -> Callable[[Capture], Made]:
    """Tensors of two samples of one length, exchanged."""

    def spoil(capture: Capture) -> Made:
        made = capture.copied()
        one, two = (made[capture.keys[number]] for number in (first, second))
        for name in names:
            one[name], two[name] = two[name], one[name]
        return made

    return spoil


def tokens_moved(by: int) -> Callable[[Capture, Tensors], Tensors]:
    """Tokens one place early (1) or late (-1) beside their states."""

    def changed(_capture: Capture, each: Tensors) -> Tensors:
        ahead, behind = (slice(1, None), slice(None, -1))[:: 1 if by > 0 else -1]
        return {name: value[ahead if name in (IDS, MASK) else behind] for name, value in each.items()}

    return changed


def layers(number: Callable[[Capture], Sequence[int]]) -> Callable[[Capture, Tensors], Tensors]:
    """Other layers captured."""
    return lambda capture, each: capture.states(capture.places(each[IDS]), number(capture))


def other_weights(share: float) -> Callable[[Capture], Made]:
    def spoil(capture: Capture) -> Made:
        model, maker = copy.deepcopy(capture.model), torch.Generator().manual_seed(1)
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=maker)
            weight.data += (share * weight.data.float().std() * drawn).to(weight.dtype)
        return capture.again(model)

    return spoil


def rope_base(factor: float) -> Callable[[Capture], Made]:
    def spoil(capture: Capture) -> Made:
        config = copy.deepcopy(capture.model.config)
        config.rope_parameters["rope_theta"] *= factor
        model = type(capture.model)(config).to(capture.model.dtype).eval()
        model.load_state_dict(capture.model.state_dict())
        return capture.again(model)

    return spoil


def attended_pads(count: int) -> Callable[[Capture, Tensors], Tensors]:
    def changed(capture: Capture, each: Tensors) -> Tensors:
        ids = torch.cat([torch.full((count,), 2), each[IDS]])
        return capture.states([states[count:] for states in capture.places(ids)])

    return changed


def chunks(size: int) -> Callable[[Capture, Tensors], Tensors]:
    """Computed piece by piece, without what stands before."""

    def changed(capture: Capture, each: Tensors) -> Tensors:
        pieces = [capture.places(ids) for ids in each[IDS].split(size)]
        return capture.states([torch.cat(states) for states in zip(*pieces, strict=True)])

    return changed


def eight_bits(dtype: torch.dtype, scaled: bool = True) -> Callable[[Capture, Tensors], Tensors]:
    """Through fp8 with one scale a tensor, or none."""

    def rounded(states: torch.Tensor) -> torch.Tensor:
        scale = float(states.abs().max()) / torch.finfo(dtype).max if scaled else 1.0
        return ((states.float() / scale).to(dtype).float() * scale).to(states.dtype)

    return lambda _capture, each: {name: rounded(each[name]) for name in (AUX, LAST)}


def users_turns(capture: Capture, each: Tensors) -> Tensors:
    """What follows `user`, with the token that ends a turn, in place of what follows `assistant`."""
    header, end = capture.tokenizer("<|im_start|>user\n")["input_ids"], capture.tokenizer.eos_token_id
    ids, found = each[IDS].tolist(), torch.zeros_like(each[MASK])
    for start in range(len(header), len(ids)):
        if ids[start - len(header) : start] == header:
            found[start : ids.index(end, start) + 1 if end in ids[start:] else None] = 1
    return {MASK: found}


def without_ends(capture: Capture, each: Tensors) -> Tensors:
    return {MASK: each[MASK] * (each[IDS] != capture.tokenizer.eos_token_id).to(torch.uint8)}


STATES, LAYER, MASKS = frozenset({"states"}), frozenset({"layer"}), frozenset({"mask"})
PREFIX, SIZE, NORM = frozenset({"prefix"}), frozenset({"size"}), frozenset({"norm"})
NO_LAYERS: dict[str, Any] = {"num_layers": None}
PRE = {"last_hidden_norm": "pre"}
NO_IDS = {"aux_layer_ids": None, "layer_id_convention": None}


def reverse(capture: Capture) -> Sequence[int]:
    return capture.layers[::-1]


def next_ones(capture: Capture) -> Sequence[int]:
    return [layer + 1 for layer in capture.layers]


#: Samples 1 and 3 have one length. Every item of the list of wrong captures, once with the right answer.
WRONG: dict[str, Wrong] = {
    "layer before, raw": Wrong(every(place(-3)), LAYER, LAST, facts=NO_LAYERS),
    "layer before, normed": Wrong(every(normed(-3)), LAYER, LAST, facts=NO_LAYERS),
    "without its last layer": Wrong(every(place(4)), LAYER, LAST, facts=NO_LAYERS | PRE),
    "last mixed": Wrong(every(last(noisy(0.03))), STATES, LAST),
    "aux noisy": Wrong(every(aux(1, noisy(0.3))), STATES, f"{AUX}[1]"),
    "aux noisy, balanced": Wrong(every(aux(1, noisy(0.3))), STATES, f"{AUX}[1]", codec="balanced"),
    "aux halved": Wrong(every(aux(1, lambda x: x / 2)), SIZE, f"{AUX}[1]"),
    "aux halved, small": Wrong(every(aux(0, lambda x: x / 2)), SIZE | STATES, f"{AUX}[0]", codec="small"),
    "aux by its rms": Wrong(every(aux(1, by_rms)), SIZE, f"{AUX}[1]"),
    "pre-norm last halved": Wrong(
        every(lambda capture, each: {LAST: capture.places(each[IDS])[-2] / 2}), SIZE, LAST, facts=PRE
    ),
    "pre as post": Wrong(every(place(-2)), NORM, LAST),
    "post as pre": Wrong(Capture.copied, NORM, LAST, facts=PRE),
    "normed twice": Wrong(every(normed(-1)), NORM, LAST),
    "zero rows in aux": Wrong(every(aux(1, zeros), [2]), frozenset({"zeros"}), f"{AUX}[1]", (2,)),
    "aux of two swapped": Wrong(swapped(1, 3, [AUX]), frozenset({"request"}), AUX, (1, 3)),
    "states of two swapped": Wrong(swapped(1, 3, [AUX, LAST]), frozenset({"request"}), AUX, (1, 3)),
    "other layers, none recorded": Wrong(every(layers(next_ones)), LAYER, AUX, facts=NO_IDS),
    "other order, none recorded": Wrong(every(layers(reverse)), LAYER, AUX, facts=NO_IDS),
    "other layers than recorded": Wrong(every(layers(next_ones)), LAYER, AUX),
    "weights 1 %": Wrong(other_weights(0.01), STATES, LAST),
    "weights 2 %": Wrong(other_weights(0.02), STATES, LAST),
    "weights 5 %, fp8": Wrong(other_weights(0.05), STATES, LAST, codec="fp8"),
    "weights 10 %, balanced": Wrong(other_weights(0.1), STATES, LAST, codec="balanced"),
    "rope base": Wrong(rope_base(0.1), STATES, LAST),
    "attended pads": Wrong(every(attended_pads(20)), STATES, LAST),
    "attended pads of one": Wrong(every(attended_pads(20), [2]), STATES, LAST, (2,)),
    "chunks of 64": Wrong(every(chunks(64), [0, 4]), PREFIX, LAST, (0, 4)),
    "fp8 twice": Wrong(every(eight_bits(torch.float8_e4m3fn)), STATES, AUX, codec="fp8"),
    "e5m2 without scales": Wrong(every(eight_bits(torch.float8_e5m2, scaled=False)), STATES, LAST),
    "rows exchanged": Wrong(every(last(exchanged), [1, 2]), STATES, LAST, (1, 2)),
    "mask one late": Wrong(every(mask(lambda x: x.roll(1))), MASKS),
    "mask three late": Wrong(every(mask(lambda x: x.roll(3))), MASKS),
    "mask one early": Wrong(every(mask(lambda x: x.roll(-1))), MASKS),
    "mask three early": Wrong(every(mask(lambda x: x.roll(-3))), MASKS),
    "mask of one three late": Wrong(every(mask(lambda x: x.roll(3)), [2]), MASKS, samples=(2,)),
    "mask of the user": Wrong(every(users_turns), MASKS),
    "mask zero": Wrong(every(mask(torch.zeros_like)), MASKS),
    "mask of one zero": Wrong(every(mask(torch.zeros_like), [2]), MASKS, samples=(2,)),
    "mask without ends": Wrong(every(without_ends), MASKS),
    "masks swapped": Wrong(swapped(1, 3, [MASK]), MASKS, samples=(1, 3)),
}  # fmt: skip


@cache
def words(seed: int, count: int) -> str:
    """Words of no meaning."""
    maker = torch.Generator().manual_seed(seed)
    drawn = torch.randint(97, 123, (count, 5), generator=maker).tolist()
    return " ".join("".join(map(chr, word)) for word in drawn)
