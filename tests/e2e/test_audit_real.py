"""The audit on a real language model, SmolLM2-135M: right captures of all kinds of text at every preset are
not accused, wrong ones are found. A part of both runs always, the whole with `-m slow`.
"""

from __future__ import annotations

import importlib
import inspect
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import IDS, WRONG, Capture, write

from hsstream.audit import Settings, audit
from hsstream.audit.probe import Model, Outputs
from hsstream.audit.report import Report
from hsstream.presets import PRESETS
from hsstream.teacher import TopKTeacher
from hsstream.weights import load_lm_head

MODULES = ("argparse", "bisect", "collections", "csv", "difflib", "heapq", "json", "logging", "shelve")
OTHER_TEMPLATE = (
    "{% for message in messages %}### {{ message['role']|capitalize }}:\n{{ message['content'] }}</s>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}### Assistant:\n{% endif %}"
)
LANGUAGES = (
    "Der Hund lief über die Straße, und niemand wusste, wohin er wollte. ",
    "Le petit chat est tombé dans la rivière hier soir, mais il sait nager. ",
    "今天天气很好。我们去公园散步吧。",
    "Привет, как твои дела? Сегодня хороший день для прогулки. ",
    "Minä rakastan sinua ja kaikkea mitä teet joka päivä. ",
)
SHORT = ("Hi.", "Yes, of course.", "What?", "I do not know what you mean.", "42", "Thank you very much!")
KINDS = ("chat", "template", "text", "code", "numbers", "short", "languages", "random")
#: What runs always, of the wrong ones and of the right ones.
WRONG_ALWAYS = ("last mixed", "chunks of 64", "normed twice", "aux of two swapped")
RIGHT_ALWAYS = (("numbers", "small"), ("short", "lossless"))


class Remembering:
    """Loads the model once and remembers what it gave for which tokens."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._given: dict[tuple[str, tuple[int, ...]], Outputs] = {}

    def __call__(self, path: str, dtype: torch.dtype, device: str) -> Any:
        self._model = self._model or Model(path, dtype, device)
        self.layers, self.width = self._model.layers, self._model.width
        self.slack, self.max_tokens = self._model.slack, self._model.max_tokens
        return self

    def outputs(self, ids: torch.Tensor) -> Outputs:
        return self._remembered("outputs", ids)

    def rounded(self, ids: torch.Tensor) -> Outputs:
        return self._remembered("rounded", ids)

    def _remembered(self, what: str, ids: torch.Tensor) -> Outputs:
        key = what, tuple(ids.tolist())
        if key not in self._given:
            self._given[key] = getattr(self._model, what)(ids)
        return self._given[key]


@pytest.fixture(scope="module")
def remembering() -> Remembering:
    return Remembering()


def empty(folder: Path) -> Capture:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return Capture(folder, model.eval(), AutoTokenizer.from_pretrained(folder), (1, 14, 26))


def documented(name: str) -> list[str]:
    """Words about a module of the standard library."""
    module = importlib.import_module(name)
    said = [inspect.getdoc(each) or "" for each in vars(module).values() if inspect.isroutine(each)]
    return " ".join([module.__doc__ or "", *said]).split()


def add_chats(capture: Capture, count: int, length: int, template: str | None = None) -> None:
    for number, name in enumerate(MODULES[:count]):
        words, cut = documented(name), 20 + 3 * number
        turns = [
            f"What is {name} for?",
            " ".join(words[:cut]),
            "And what else?",
            " ".join(words[cut : 2 * cut]),
        ]
        capture.add_chat(f"chat{number}", turns, length if number in (1, 3) else 2 * length, template)


@pytest.fixture(scope="module")
def capture(smollm2_folder: Path) -> Capture:
    """Six chats, the second and the fourth of one length."""
    made = empty(smollm2_folder)
    add_chats(made, 6, 90)
    return made


def texts(kind: str) -> list[str]:
    maker = random.Random(0)
    if kind == "text":
        return [" ".join(documented(name) * 4) for name in MODULES[:3]]
    if kind == "code":
        return [inspect.getsource(importlib.import_module(name))[2_000:3_000] for name in MODULES[:6]]
    if kind == "numbers":
        return [" ".join(str(maker.randrange(10_000)) for _ in range(40)) for _ in range(4)]
    return list(SHORT) if kind == "short" else [text * 4 for text in LANGUAGES]


@pytest.fixture(scope="module")
def right(smollm2_folder: Path) -> Any:
    """A right capture of some kind of text, made once."""
    made: dict[str, Capture] = {}

    def of(kind: str) -> Capture:
        if kind not in made:
            found = made[kind] = empty(smollm2_folder)
            if kind in ("chat", "template"):
                add_chats(found, 9, 90, OTHER_TEMPLATE if kind == "template" else None)
            elif kind == "random":
                for number in range(4):
                    maker = torch.Generator().manual_seed(number)
                    found.add(f"random{number}", torch.randint(49_152, (100,), generator=maker).tolist())
            else:
                for number, text in enumerate(texts(kind)):
                    length = 500 if kind == "text" else 100
                    found.add(f"{kind}{number}", found.tokenizer(text)["input_ids"][:length])
        return made[kind]

    return of


def audited(capture: Capture, root: Path, remembering: Remembering) -> Report:
    return audit(str(root), str(capture.folder), Settings(), load=remembering)


def marked(cases: Any, always: Any) -> list[Any]:
    """Cases for parametrize, slow but for some."""
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*values, marks=() if case in always else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("kind", "codec"), marked([(k, c) for k in KINDS for c in PRESETS], RIGHT_ALWAYS))
def test_right_captures_are_not_accused(
    right: Any, remembering: Remembering, tmp_path: Path, kind: str, codec: str
) -> None:
    capture, more = right(kind), dict[str, Any]()
    if codec == "sparse":
        more["teacher"] = TopKTeacher(load_lm_head(capture.folder), 64)
    report = audited(capture, write(tmp_path, capture.copied(), capture.facts, codec, **more), remembering)
    assert report.ok, report.findings
    assert report.compared["tokens"] == sum(len(each[IDS]) for each in capture.samples.values())


@pytest.mark.parametrize("codec", ["lossless", "fp8"])
def test_what_is_spoiled_below_is_right(
    capture: Capture, remembering: Remembering, tmp_path: Path, codec: str
) -> None:
    report = audited(capture, write(tmp_path, capture.copied(), capture.facts, codec), remembering)
    assert report.ok, report.findings
    assert report.own is not None
    assert report.own["cross_entropy"] == pytest.approx(report.total.to_dict()["cross_entropy"], rel=0.05)


@pytest.mark.parametrize("name", marked(WRONG, WRONG_ALWAYS))
def test_wrong_captures_are_found(
    capture: Capture, remembering: Remembering, tmp_path: Path, name: str
) -> None:
    wrong = WRONG[name]
    root = write(tmp_path, wrong.spoil(capture), wrong.recorded(capture), wrong.codec)
    report = audited(capture, root, remembering)
    assert {finding.kind for finding in report.findings} & wrong.kinds, report.findings
    assert any(wrong.names in finding.message for finding in report.findings)
    if wrong.samples:
        assert sorted(report.suspects) == [capture.keys[number] for number in wrong.samples]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_head_alone_accuses_no_right_capture(right: Any, tmp_path: Path, kind: str) -> None:
    capture = right(kind)
    root = write(tmp_path, capture.copied(), capture.facts)
    report = audit(str(root), str(capture.folder), Settings(run=0))
    assert report.ok, report.findings
