"""The audit passes a real capture and catches what was planted in copies of it; its parts by themselves."""

from __future__ import annotations

import importlib
import inspect
import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hsstream.audit import Settings, audit, masks
from hsstream.audit.choose import numbers, source_of
from hsstream.audit.lens import Lens
from hsstream.audit.report import KINDS
from hsstream.audit.template import Tokens
from hsstream.cli import main
from hsstream.errors import SampleError
from hsstream.norm import FinalNorm
from hsstream.reader import ShardReader
from hsstream.sample import ModelInfo
from hsstream.writer import ShardWriter

TOOLS = Path(__file__).parents[2] / "tools"
Tensors = dict[str, torch.Tensor]
Change = Callable[[dict[str, Tensors]], Any]

# ---------------------------------------------------------------- a head that knows what comes next

V, H, SAMPLES = 300, 32, 12
FACTS = ModelInfo(hidden_size=H, num_layers=4, vocab_size=V, last_hidden_norm="post")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: a head and a final norm, nothing between."""
    made = tmp_path_factory.mktemp("model")
    maker = torch.Generator().manual_seed(0)
    weights = {
        "lm_head.weight": torch.randn(V, H, generator=maker),
        "model.norm.weight": torch.rand(H, generator=maker) + 0.5,
    }
    save_file(weights, made / "model.safetensors")
    (made / "config.json").write_text(json.dumps({"model_type": "none-such", "rms_norm_eps": 1e-5}))
    return made


def toy(folder: Path, tokens: int = 120) -> dict[str, Tensors]:
    """Samples in chats of two turns whose states point to the token that follows."""
    head, made = Lens(folder).head, {}
    for number in range(SAMPLES):
        maker = random.Random(number)
        words = [maker.randrange(20, V) for _ in range(tokens)]
        mask = [0] * tokens
        for start in (30 + number, 80 + number):
            # 1: a turn begins; 2, 3: who speaks; 4: a turn ends.
            words[start - 3 : start] = [1, 2, 3]
            words[start + 20] = 4
            mask[start : start + 21] = [1] * 21
        ids = torch.tensor(words)
        noise = torch.randn(tokens, H, generator=torch.Generator().manual_seed(number))
        states = FinalNorm(folder)(head[torch.roll(ids, -1)] + 0.5 * noise)
        made[f"s{number:02d}"] = {
            "input_ids": ids,
            "loss_mask": torch.tensor(mask, dtype=torch.uint8),
            "last_hidden_state": states.bfloat16(),
        }
    return made


def write(
    root: Path, made: Mapping[str, Tensors], facts: ModelInfo = FACTS, codec: str = "planes", **writer: Any
) -> Path:
    with ShardWriter(root, model=facts, codec=codec, **writer) as out:
        for number, (key, tensors) in enumerate(made.items()):
            out.write(key, tensors, meta={"source": f"{'ab'[number % 2]}.jsonl:{number}"})
    return root


def audited(root: Path, folder: Path, **settings: Any) -> Any:
    return audit(str(root), str(folder), Settings(**({"run": 0, "tokens": 96} | settings)))


def kinds(report: Any) -> list[str]:
    return [finding.kind for finding in report.findings]


def pre(states: torch.Tensor, folder: Path) -> torch.Tensor:
    """States that the norm turns into these, each of a size of its own."""
    weight = FinalNorm(folder)(torch.full((H,), 1e3))
    sizes = torch.linspace(3, 40, len(states))[:, None]
    return (states.float() / weight * sizes).bfloat16()


@pytest.mark.parametrize("codec", ["planes", "fp8", "bounded:0.05"])
def test_a_right_capture_passes_in_any_codec(tmp_path: Path, folder: Path, codec: str) -> None:
    report = audited(write(tmp_path, toy(folder), codec=codec), folder)
    assert report.ok, report.findings
    assert report.norm == {"declared": "post", "found": "post"}
    assert report.total.first > 0.5 * report.total.tokens
    assert report.total.tokens == sum(figures.tokens for figures in report.by_position.values())
    assert report.total.tokens == sum(figures.tokens for figures in report.by_source.values())
    assert list(report.by_source) == ["a.jsonl", "b.jsonl"]
    assert report.spans == 2 * SAMPLES


def test_states_before_the_norm_pass_where_they_are_said_to_be(tmp_path: Path, folder: Path) -> None:
    made = toy(folder)
    for each in made.values():
        each["last_hidden_state"] = pre(each["last_hidden_state"], folder)
    assert audited(write(tmp_path / "pre", made, replace(FACTS, last_hidden_norm="pre")), folder).ok
    report = audited(write(tmp_path / "post", made), folder)
    assert kinds(report) == ["norm"]
    assert report.norm == {"declared": "post", "found": "pre"}


def test_only_stored_rows_are_judged(tmp_path: Path, folder: Path) -> None:
    report = audited(write(tmp_path, toy(folder), last_rows="supervised", ttt_length=3), folder)
    assert report.ok, report.findings
    assert report.total.tokens < SAMPLES * 96


def swap(made: dict[str, Tensors]) -> None:
    a, b = made["s02"], made["s07"]
    a["last_hidden_state"], b["last_hidden_state"] = b["last_hidden_state"], a["last_hidden_state"]


def cut_prefix(made: dict[str, Tensors], tokens: int = 30, keys: tuple[str, ...] = ("s03", "s09")) -> None:
    for key in keys:
        each = made[key]
        states = each["last_hidden_state"][tokens:]
        made[key] = {name: value[: len(states)] for name, value in each.items()} | {
            "last_hidden_state": states
        }


def shift_states(made: dict[str, Tensors]) -> None:
    cut_prefix(made, 1, tuple(made))


def shift_quarter(made: dict[str, Tensors]) -> None:
    cut_prefix(made, 1, tuple(made)[::4])


def swap_masks(made: dict[str, Tensors]) -> None:
    a, b = made["s02"], made["s07"]
    a["loss_mask"], b["loss_mask"] = b["loss_mask"], a["loss_mask"]


def no_masks(made: dict[str, Tensors]) -> None:
    for each in made.values():
        each["loss_mask"].zero_()


def open_ends(made: dict[str, Tensors]) -> None:
    for each in made.values():
        each["loss_mask"][each["input_ids"] == 4] = 0


def blank(made: dict[str, Tensors]) -> None:
    made["s05"]["last_hidden_state"][:20] = 0


def roll_masks(places: int, keys: Callable[[str], bool] = lambda _: True) -> Change:
    def change(made: dict[str, Tensors]) -> None:
        for key, each in made.items():
            if keys(key):
                each["loss_mask"] = torch.roll(each["loss_mask"], places)

    return change


def other_tokens(made: dict[str, Tensors]) -> None:
    for number, each in enumerate(made.values()):
        maker = torch.Generator().manual_seed(number)
        each["input_ids"] = torch.randint(V, each["input_ids"].shape, generator=maker)
        each["loss_mask"].fill_(1)


PLANTED = {
    "swap": (swap, "request", ("s02", "s07"), "belong to the tokens of s0"),
    "prefix": (cut_prefix, "prefix", ("s03", "s09"), "the first 30 tokens are missing"),
    "shift": (shift_states, "shift", tuple(f"s{n:02d}" for n in range(SAMPLES)), "1 place later"),
    "zeros": (blank, "zeros", ("s05",), "all zero"),
    "quarter": (shift_quarter, "shift", ("s00", "s04", "s08"), "1 place later"),
    "late": (roll_masks(1), "mask", (), "1 token too late"),
    "early": (roll_masks(-1), "mask", (), "1 token too early"),
    "one late": (roll_masks(1, "s04".__eq__), "mask", ("s04",), "1 token too late"),
    "one early": (roll_masks(-1, "s04".__eq__), "mask", ("s04",), "1 token too early"),
    "three late": (roll_masks(3), "mask", (), "3 tokens too late"),
    "three early": (roll_masks(-3), "mask", (), "3 tokens too early"),
    "swapped": (swap_masks, "mask", ("s02", "s07"), "too"),
    "none": (no_masks, "mask", (), "no token of any sample"),
    "one none": (lambda made: made["s04"]["loss_mask"].zero_(), "mask", ("s04",), "no supervised token"),
    "open": (open_ends, "mask", (), "before the token that ends a turn"),
}


def test_tokens_that_nothing_predicts_are_no_finding_without_the_model(tmp_path: Path, folder: Path) -> None:
    made = toy(folder)
    other_tokens(made)
    report = audited(write(tmp_path, made), folder)
    assert report.ok, report.findings
    assert any("predict the tokens after them no better" in note for note in report.notes)


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_is_named_with_its_samples(tmp_path: Path, folder: Path, name: str) -> None:
    change, kind, keys, text = PLANTED[name]
    made = toy(folder)
    change(made)
    report = audited(write(tmp_path, made), folder)
    assert set(kinds(report)) == {kind}, report.findings
    assert tuple(sorted(report.suspects)) == keys
    assert text in report.findings[0].message
    assert set(kinds(report)) <= KINDS.keys()


def test_states_of_a_sample_that_is_not_there_are_suspect_too(tmp_path: Path, folder: Path) -> None:
    made = toy(folder)
    noise = torch.randn(120, H, generator=torch.Generator().manual_seed(7))
    made["s02"]["last_hidden_state"] = FinalNorm(folder)(noise).bfloat16()
    report = audited(write(tmp_path, made), folder)
    assert (kinds(report), report.suspects) == (["request"], ["s02"])
    assert "do not belong to their tokens" in report.findings[0].message


def test_tokens_off_by_one_are_seen_where_words_come_again(tmp_path: Path, folder: Path) -> None:
    """Each token stands twice, so that states that are moved by one are right at every other place."""
    made = toy(folder)
    head, norm = Lens(folder).head, FinalNorm(folder)
    for number, each in enumerate(made.values()):
        ids = each["input_ids"][:60].repeat_interleave(2)
        noise = torch.randn(len(ids), H, generator=torch.Generator().manual_seed(number))
        each["input_ids"], each["loss_mask"] = ids, torch.ones(len(ids), dtype=torch.uint8)
        each["last_hidden_state"] = norm(head[torch.roll(ids, -1)] + 0.5 * noise).bfloat16()
    assert audited(write(tmp_path / "right", made), folder).ok
    shift_quarter(made)
    report = audited(write(tmp_path / "wrong", made), folder)
    assert (kinds(report), report.suspects) == (["shift"], ["s00", "s04", "s08"])


def test_the_end_of_a_long_sample_is_looked_at(tmp_path: Path, folder: Path) -> None:
    made = toy(folder, 400)
    other = made["s01"]["last_hidden_state"].clone()
    made["s06"]["last_hidden_state"][200:] = other[200:]
    report = audited(write(tmp_path, made), folder)
    assert (kinds(report), report.suspects) == (["request"], ["s06"])


# ---------------------------------------------------------------- what cannot be checked, or audited


def test_what_is_not_checked_is_said(tmp_path: Path, folder: Path) -> None:
    made = toy(folder)
    for each in made.values():
        each["loss_mask"].fill_(1)
    report = audited(write(tmp_path, made, replace(FACTS, last_hidden_norm=None)), folder)
    assert report.ok
    assert len(report.notes) == 3
    assert "does not say" in report.notes[0]
    assert "the model was not run" in report.notes[1]
    assert "0 supervised spans begin inside a sample" in report.notes[2]


def test_a_model_that_cannot_be_run_is_a_note(tmp_path: Path, folder: Path) -> None:
    report = audited(write(tmp_path, toy(folder)), folder, run=1)
    assert report.ok
    assert report.layers is None
    assert any(note.startswith("layers not checked") for note in report.notes)
    assert report.compared == {"samples": 0, "tokens": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "an audit compares"),
        ({"last_hidden_state": None}, "an audit compares"),
        ({"last_hidden_state": torch.ones(120, 16).bfloat16()}, "another model"),
        ({"input_ids": torch.full((120,), V)}, "another model"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    tmp_path: Path, folder: Path, change: dict[str, Any], message: str
) -> None:
    made = {"a": {n: v for n, v in (toy(folder)["s00"] | change).items() if v is not None}}
    root = write(tmp_path, made, ModelInfo())
    with pytest.raises(SampleError, match=message):
        audited(root, folder)


def test_a_folder_without_a_head_is_refused(tmp_path: Path, folder: Path) -> None:
    root = write(tmp_path / "root", toy(folder))
    with pytest.raises(SampleError, match="point to a model folder"):
        audited(root, tmp_path)


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("count", "wanted", "found"), [(3, 5, [0, 1, 2]), (9, 3, [0, 4, 8]), (4, 0, [0, 1, 2, 3])]
)
def test_samples_are_evenly_spread(count: int, wanted: int, found: list[int]) -> None:
    assert numbers(count, wanted) == found


@pytest.mark.parametrize(
    ("meta", "source"),
    [
        ({}, "unknown"),
        ({"source": "a.jsonl:7"}, "a.jsonl"),
        ({"source": "rows/data_7.ckpt"}, "rows"),
        ({"source": 3}, "3"),
    ],
)
def test_sources_are_named_without_the_number(meta: dict[str, Any], source: str) -> None:
    assert source_of(meta) == source


def chats(count: int, begins: int = 0, ends: int = 0, tag: bool = False, closed: bool = True) -> Any:
    """Spans after `1 2 3`, with a tag in front of the words or not, the end-of-turn token supervised or not,
    moved by `begins` and `ends`."""
    found = []
    for number in range(count):
        maker = np.random.default_rng(number)
        words = maker.integers(20, 999, 20)
        said = [*([8, 9] if tag else []), *maker.integers(20, 999, 12), 4]
        ids = np.array([*words, 1, 2, 3, *said, 5, *words[:6]])
        start, stop = 23 + begins, 23 + len(said) - (not closed) + ends
        found.append((f"s{number}", ids, [start, stop]))
    result = masks.judge(found, Tokens(None))
    return [finding.message for finding in result.findings], result.why


def test_masks_are_judged_by_what_stands_before_spans() -> None:
    assert chats(20) == ([], None)
    assert chats(20, tag=True) == ([], None)
    assert "before the token that ends a turn" in chats(20, closed=False)[0][0]
    for count in (1, 2, 3):
        assert f"{count} token{'s' * (count > 1)} too late" in chats(20, count, count)[0][0]
        assert f"{count} token{'s' * (count > 1)} too early" in chats(20, -count, -count)[0][0]
    assert "8 needed" in chats(5)[1]


def test_text_without_a_template_is_not_judged() -> None:
    found = [(f"s{n}", np.random.default_rng(n).integers(0, 999, 30), [10, 20]) for n in range(20)]
    result = masks.judge(found, Tokens(None))
    assert result.findings == []
    assert "nothing that a chat template puts" in str(result.why)


# ---------------------------------------------------------------- a real model


@dataclass
class Capture:
    """What tools/extract.py captured, and what else the model gives for the same tokens."""

    model: str
    root: Path
    made: dict[str, Tensors]
    facts: ModelInfo
    outputs: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]


MODULES = ("argparse", "bisect", "collections", "csv", "difflib", "heapq", "json")


def write_chats(path: Path) -> None:
    """Two turns about each of seven modules of the standard library, in its own words, some 150 tokens."""
    rows = []
    for name in MODULES:
        module = importlib.import_module(name)
        said = [inspect.getdoc(each) or "" for each in vars(module).values() if inspect.isroutine(each)]
        words = " ".join([module.__doc__ or "", *said]).split()
        halves = " ".join(words[:50]), " ".join(words[50:90])
        turns = [("user", f"What is {name} for?"), ("assistant", halves[0])]
        turns += [("user", f"And what else can {name} do?"), ("assistant", halves[1])]
        rows.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    path.write_text("\n".join(rows))


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Capture:
    sys.path.insert(0, str(TOOLS))
    import extract
    from transformers import AutoModelForCausalLM

    folder, model_folder = tmp_path_factory.mktemp("capture"), str(smollm2_folder)
    write_chats(folder / "chats.jsonl")
    words = ["--model", model_folder, "--out", str(folder / "root"), str(folder / "chats.jsonl")]
    # float32: many processors are slow in bf16, and what is audited is the same
    assert extract.main([*words, "--codec", "raw", "--dtype", "float32"]) == 0
    reader = ShardReader(folder / "root")
    made = {sample.key: dict(sample.tensors) for sample in reader}
    outputs, before = {}, {}
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    handle = model.model.norm.register_forward_hook(lambda _m, given, _o: before.update(now=given[0][0]))
    with torch.inference_mode():
        for key, each in made.items():
            output = model(each["input_ids"][None], output_hidden_states=True, use_cache=False)
            outputs[key] = torch.stack([state[0].clone() for state in output.hidden_states])
            before[key] = before.pop("now").clone()
    handle.remove()
    facts = reader.index.info.model
    assert facts is not None
    return Capture(model_folder, folder / "root", made, facts, outputs, before)


def copied(capture: Capture) -> dict[str, Tensors]:
    return {key: dict(tensors) for key, tensors in capture.made.items()}


def sold_as_post(capture: Capture, made: dict[str, Tensors]) -> None:
    for key, each in made.items():
        each["last_hidden_state"] = capture.before[key].clone()


def layers_off(capture: Capture, made: dict[str, Tensors]) -> None:
    """Every state one layer too early."""
    norm = FinalNorm(capture.model)
    for key, each in made.items():
        outputs = capture.outputs[key].clone()
        # Entry k of outputs is what layer k - 1 gives.
        each["aux_hidden_states"] = torch.stack(
            [outputs[layer] for layer in capture.facts.aux_layer_ids or ()], 1
        )
        each["last_hidden_state"] = norm(outputs[-2])


def two_swapped(capture: Capture, made: dict[str, Tensors]) -> None:
    first, second = list(made)[2:7:4]
    shortest = min(len(made[key]["input_ids"]) for key in (first, second))
    for key in (first, second):
        made[key] = {name: value[:shortest] for name, value in made[key].items()}
    for name in ("aux_hidden_states", "last_hidden_state"):
        made[first][name], made[second][name] = made[second][name], made[first][name]


def prefix_missing(capture: Capture, made: dict[str, Tensors]) -> None:
    key = list(made)[4]
    kept = len(made[key]["input_ids"]) - 32
    states = {name: made[key][name][32:] for name in ("aux_hidden_states", "last_hidden_state")}
    made[key] = {name: value[:kept] for name, value in made[key].items()} | states


def masks_shifted(capture: Capture, made: dict[str, Tensors]) -> None:
    for each in made.values():
        each["loss_mask"] = torch.roll(each["loss_mask"], 1)


@pytest.mark.parametrize(
    ("plant", "kind", "run", "named"),
    [
        (None, None, 2, ()),
        (sold_as_post, "norm", 0, ()),
        (layers_off, "layer", 2, ()),
        (two_swapped, "request", 0, (2, 6)),
        (prefix_missing, "prefix", 0, (4,)),
        (masks_shifted, "mask", 0, ()),
    ],
    ids=["right", "norm", "layers", "swapped", "prefix", "mask"],
)
def test_a_real_capture_passes_and_planted_faults_do_not(
    capture: Capture, tmp_path: Path, capsys: pytest.CaptureFixture[str], plant: Any, kind: str | None,
    run: int, named: tuple[int, ...],
) -> None:  # fmt: skip
    root = capture.root
    if plant is not None:
        made = copied(capture)
        plant(capture, made)
        root = write(tmp_path, made, capture.facts, codec="raw")
    words = [
        "audit",
        str(root),
        "--model",
        capture.model,
        "--tokens",
        "96",
        "--run-model",
        str(run),
        "--json",
    ]
    code = main(words)
    facts = json.loads(capsys.readouterr().out)
    assert code == (0 if kind is None else 1), facts["findings"]
    assert {finding["kind"] for finding in facts["findings"]} == (set() if kind is None else {kind})
    assert sorted(facts["suspects"]) == sorted(list(capture.made)[place] for place in named)
    if kind is None:
        assert [each["declared"] for each in facts["layers"]] == [each["found"] for each in facts["layers"]]
        assert facts["top1"] > 0.3
    if kind == "layer":
        assert [each["found"] - each["declared"] for each in facts["layers"]] == [-1, -1, -1, -1]
        assert len(facts["findings"]) == 4


def test_the_screen_says_what_was_found(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folder), "--run-model", "0"]
    assert main(["audit", str(write(tmp_path / "right", toy(folder))), *words]) == 0
    out = capsys.readouterr().out
    assert "cross-entropy" in out
    assert out.splitlines()[-1].startswith("ok: ")
    made = toy(folder)
    swap(made)
    assert main(["audit", str(write(tmp_path / "wrong", made)), *words]) == 1
    assert "(s02)" in capsys.readouterr().out
