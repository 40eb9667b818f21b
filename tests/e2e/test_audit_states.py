"""The audit runs the model: every kind of wrong capture is found and named, right ones are not accused.

A random language model of 8 layers carries the mechanics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captures import IDS, LAST, WRONG, Capture, words, write
from tiny_model import make_model, make_tokenizer

from hsstream.audit import Settings, audit
from hsstream.audit.report import KINDS, Report
from hsstream.presets import PRESETS
from hsstream.teacher import TopKTeacher
from hsstream.weights import load_lm_head


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Capture:
    """Six chats; the second and the fourth are of one length."""
    folder = tmp_path_factory.mktemp("tiny")
    model, tokenizer = make_model(), make_tokenizer()
    maker = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        # Random weights are so small that layers, positions and other tokens hardly matter; norms' are all 1.
        weight.data *= 5.0 if weight.ndim > 1 else torch.rand(weight.shape, generator=maker) + 0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = Capture(folder, model, tokenizer, (1, 3, 4))
    for number in range(6):
        turns = [words(5 * number + turn, 3 + (number * turn) % 4) for turn in range(4)]
        made.add_chat(f"s{number}", turns, (200, 110, 150, 110, 160, 90)[number])
    return made


def audited(capture: Capture, root: Path) -> Report:
    return audit(str(root), str(capture.folder), Settings())


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_capture_is_found(capture: Capture, tmp_path: Path, name: str) -> None:
    wrong = WRONG[name]
    root = write(tmp_path, wrong.spoil(capture), wrong.recorded(capture), wrong.codec)
    report = audited(capture, root)
    assert {finding.kind for finding in report.findings} & wrong.kinds, report.findings
    assert {finding.kind for finding in report.findings} <= KINDS.keys()
    assert any(wrong.names in finding.message for finding in report.findings)
    if wrong.samples:
        assert sorted(report.suspects) == [capture.keys[number] for number in wrong.samples]


@pytest.mark.parametrize("codec", PRESETS)
def test_a_right_capture_is_not_accused(capture: Capture, tmp_path: Path, codec: str) -> None:
    more: dict[str, Any] = {}
    if codec == "sparse":
        more["teacher"] = TopKTeacher(load_lm_head(capture.folder), 16)
    report = audited(capture, write(tmp_path, capture.copied(), capture.facts, codec, **more))
    assert report.ok, report.findings
    assert report.compared == {"samples": 6, "tokens": sum(len(s[IDS]) for s in capture.samples.values())}
    assert report.layers is not None
    assert [line["found"] for line in report.layers if line["name"] != LAST] == [1, 3, 4]
