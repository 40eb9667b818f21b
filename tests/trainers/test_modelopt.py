"""Model-Optimizer's own data set, collator and training loop against ours, on the same dumped files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import modelopt.torch.speculative.eagle.utils as eagle_utils
import modelopt_recipes
import pytest
import torch
import transformers
from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from modelopt.torch.speculative.plugins.hf_eagle import HFEagleModel
from samples import bits
from sources import write_modelopt
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM
from verifier import DEPTH, LAYERS, VOCAB, config, follow_the_refusal, made_samples, pack_at_once, packed

from hsstream.cli import main
from hsstream.errors import SchemaMismatchError
from hsstream.plan import Order
from hsstream.sources.base import HF_INDEX, Options
from hsstream.trainers import modelopt_launch
from hsstream.trainers.modelopt import ModelOptBatches, ModelOptSamples
from hsstream.vocab import find_map

TRAIN_LEN = 48  # shorter than some samples, longer than others


def equal(ours: Any, theirs: Any, where: str = "batch") -> None:
    """Same names, dtypes, shapes and bits, however deep."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name, value in theirs.items():
            equal(ours[name], value, f"{where}.{name}")
    elif isinstance(theirs, torch.Tensor):
        assert bits(ours) == bits(theirs), where
    else:
        assert ours == theirs, where
        assert type(ours) is type(theirs), where


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """(dumped files, the data set packed from them): after the norm, as Hugging Face dumps are."""
    folder = tmp_path_factory.mktemp("modelopt")
    write_modelopt(folder / "files", made_samples())
    root = packed(folder / "files", folder / "root", "modelopt", Options(last_norm="post"))
    return sorted((folder / "files").glob("*.pt")), root


@pytest.mark.parametrize("answers", [False, True])
def test_samples_and_batches_are_those_of_its_own_data_set(
    dumped: tuple[list[Path], Path], answers: bool
) -> None:
    files, root = dumped
    theirs, ours = OfflineSupervisedDataset(files, answers), ModelOptSamples(root, answers)
    assert len(ours) == len(theirs)
    for number in range(len(theirs)):
        equal(ours[number], theirs[number])
    collate = EagleOfflineDataCollator(TRAIN_LEN)
    short = ModelOptSamples(root, answers, train_len=TRAIN_LEN)
    loaders = [DataLoader(each, batch_size=3, collate_fn=collate) for each in (short, theirs)]
    for mine, real in zip(*loaders, strict=True):
        equal(mine, real)


@pytest.mark.parametrize("answers", [False, True])
def test_streamed_batches_are_those_of_its_collator(dumped: tuple[list[Path], Path], answers: bool) -> None:
    files, root = dumped
    by_key = {path.stem: number for number, path in enumerate(files)}
    theirs, collate = OfflineSupervisedDataset(files, answers), EagleOfflineDataCollator(TRAIN_LEN)
    batches = ModelOptBatches(root, TRAIN_LEN, 2, answers, order=Order(seed=1), rank=0, world_size=1)
    seen = []
    for batch in batches:
        equal(dict(batch), collate([theirs[by_key[key]] for key in batch.sample_keys]))
        seen += batch.sample_keys
    assert sorted(seen) == sorted(by_key)


def test_states_before_the_norm_are_declared(tmp_path: Path) -> None:
    write_modelopt(tmp_path / "files", made_samples((20, 30)), prenorm=True)
    root = packed(tmp_path / "files", tmp_path / "root", "modelopt")
    files = sorted((tmp_path / "files").glob("*.pt"))
    theirs, ours = OfflineSupervisedDataset(files), ModelOptSamples(root)
    for number in range(2):
        equal(ours[number], theirs[number])
    assert ours[0]["base_hidden_prenorm"] is True


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_exported_files_are_read_by_its_own_data_set(tmp_path: Path, norm: str, answers: bool) -> None:
    write_modelopt(tmp_path / "files", made_samples((20, 30, 25)))
    root = packed(tmp_path / "files", tmp_path / "root", "modelopt", Options(last_norm=norm))
    assert main(["export", str(root), str(tmp_path / "back"), "--to", "modelopt"]) == 0
    theirs = OfflineSupervisedDataset(sorted((tmp_path / "back").glob("*.pt")), answers)
    ours = ModelOptSamples(root, answers)
    assert len(theirs) == len(ours) == 3
    for number in range(3):
        equal(ours[number], theirs[number])


def eagle(draft_vocab: int = VOCAB) -> Any:
    """A tiny base model in bf16, converted; the same weights at every call."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(config()).to(torch.bfloat16)
    base.config.num_orig_hidden_layers = DEPTH
    draft = {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "draft_vocab_size": draft_vocab,
    }
    settings = EAGLE3_DEFAULT_CFG["config"]
    architecture = settings["eagle_architecture_config"] | draft
    options = {"eagle_offline": True, "eagle_use_torch_compile": False, "eagle_ttt_steps": 2}
    torch.manual_seed(1)
    mtsp.convert(base, [("eagle", settings | options | {"eagle_architecture_config": architecture})])
    return base


def test_a_draft_vocabulary_is_loaded_by_the_model(dumped: tuple[list[Path], Path], tmp_path: Path) -> None:
    out, model = tmp_path / "d2t.pt", eagle(40)
    words = ["vocab", str(dumped[1]), "--size", "40", "--out", str(out), "--to", "modelopt"]
    assert main(words) == 0
    HFEagleModel.load_draft_vocab_cache(model, str(out))
    made = find_map(out, VOCAB)
    assert made is not None
    assert bits(model.eagle_module.d2t) == bits(made.d2t)
    logits = torch.arange(VOCAB).expand(1, 2, VOCAB)
    assert model._map_logits_to_draft_vocab(logits)[0, 1].tolist() == made.target_ids.tolist()


def ten_losses(batches: Iterable[dict[str, Any]]) -> list[float]:
    """Losses of ten optimizer steps."""
    model = eagle().train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    while len(losses) < 10:
        for batch in batches:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses[:10]


def test_ten_steps_have_the_same_losses(dumped: tuple[list[Path], Path]) -> None:
    files, root = dumped
    ours = ModelOptBatches(root, TRAIN_LEN, 2, order=Order(shuffle=False), rank=0, world_size=1)
    theirs = DataLoader(
        OfflineSupervisedDataset(files), batch_size=2, collate_fn=EagleOfflineDataCollator(TRAIN_LEN)
    )
    losses = ten_losses(theirs)
    assert ten_losses(ours) == losses
    assert losses[-1] < losses[0]


def trained(dataset: Any, folder: Path) -> list[float]:
    """Losses that the Hugging Face trainer logs in ten steps, with its own sampler."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=10, logging_steps=1, use_cpu=True,
        report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True, seed=3,
        dataloader_pin_memory=False, learning_rate=1e-3,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=eagle(),
        args=arguments,
        train_dataset=dataset,
        data_collator=EagleOfflineDataCollator(TRAIN_LEN),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_hugging_face_trainer_runs_on_our_samples(
    dumped: tuple[list[Path], Path], tmp_path: Path
) -> None:
    files, root = dumped
    ours = ModelOptSamples(root, train_len=TRAIN_LEN)
    ours.bind(eagle())
    losses = trained(OfflineSupervisedDataset(files), tmp_path)
    assert len(losses) == 10
    assert trained(ours, tmp_path) == losses


def test_the_models_layers_are_compared(tmp_path: Path) -> None:
    write_modelopt(tmp_path / "files", made_samples((20,)))
    counted = {"aux_layer_ids": [layer + 1 for layer in LAYERS], "layer_id_convention": HF_INDEX}
    options = Options(last_norm="post")
    root = packed(tmp_path / "files", tmp_path / "counted", "modelopt", options, **counted)
    ModelOptSamples(root).bind(eagle())
    other = packed(tmp_path / "files", tmp_path / "other", "modelopt", options, aux_layer_ids=[0, 3, 4])
    with pytest.raises(SchemaMismatchError, match="missing 1"):
        ModelOptSamples(other).bind(eagle())


# ---------------------------------------------------------------- its scripts

SCRIPT = """
import json, sys
from pathlib import Path
from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset
import test_modelopt

def found(words):
    return words[words.index("--offline_data_path") + 1]

files = sorted(Path(found(sys.argv)).rglob("*.pt"))
if not files:
    raise ValueError("no dumped files")
losses = test_modelopt.trained(OfflineSupervisedDataset(files, answer_only_loss=True), Path(sys.argv[1]))
Path(sys.argv[1], "losses.json").write_text(json.dumps(losses))
"""


def test_a_training_script_runs_on_a_root(dumped: tuple[list[Path], Path], tmp_path: Path) -> None:
    files, root = dumped
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    argv, path = list(sys.argv), list(sys.path)
    assert main(["train", "modelopt", "--root", str(root), "--", str(script), str(tmp_path)]) == 0
    losses = trained(OfflineSupervisedDataset(files, answer_only_loss=True), tmp_path)
    assert json.loads((tmp_path / "losses.json").read_text()) == losses
    assert (sys.argv, sys.path) == (argv, path)
    assert eagle_utils.OfflineSupervisedDataset is OfflineSupervisedDataset


@pytest.mark.parametrize("layers", ["1,3,4", None])
def test_a_newcomer_reaches_the_first_step(
    tmp_path: Path, layers: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One pack, one train; packed without --aux-layers, the command that the refusal names comes between."""
    write_modelopt(tmp_path / "files", made_samples())
    root, script = tmp_path / "root", tmp_path / "main.py"
    pack_at_once(tmp_path / "files", root, "--last-norm", "post", layers=layers)
    assert not list((tmp_path / "files").glob("*.pt"))
    script.write_text(SCRIPT)
    words = ["train", "modelopt", "--root", str(root), "--", str(script), str(tmp_path)]
    if layers is None:
        assert main(words) != 0
        follow_the_refusal(capsys.readouterr().err, root)
    assert main(words) == 0
    assert len(json.loads((tmp_path / "losses.json").read_text())) == 10


RECIPE = """
from pathlib import Path
import sys
from modelopt.recipe import load_recipe
from modelopt.torch.speculative.eagle.utils import OfflineSupervisedDataset
import test_modelopt

data = load_recipe(sys.argv[2], overrides=sys.argv[3:]).data
files = [str(path) for path in Path(data.offline_data_path).rglob("*.pt")]
if data.sample_size > 0:
    files = files[: data.sample_size]
print("samples", len(OfflineSupervisedDataset(files, answer_only_loss=True)))
"""


@pytest.mark.parametrize(
    ("words", "samples"), [([], 8), (["data.sample_size=3"], 3), (["data.sample_size=100"], 8)]
)
def test_as_many_samples_as_the_recipe_says(
    dumped: tuple[list[Path], Path], tmp_path: Path, words: list[str], samples: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "main.py").write_text(RECIPE)
    recipe = Path(modelopt_recipes.__path__[0], "general", "speculative_decoding", "eagle3.yaml")
    command = ["train", "modelopt", "--root", str(dumped[1]), "--", str(tmp_path / "main.py")]
    assert main([*command, "--config", str(recipe), *words]) == 0
    assert f"samples {samples}" in capsys.readouterr().out


def test_the_script_is_told_where_to_look(tmp_path: Path) -> None:
    placed = modelopt_launch._placed
    assert placed(["main.py"], "F") == ["main.py", "--offline_data_path", "F"]
    assert placed(["main.py", "--config", "x.yaml"], "F")[-1] == "data.offline_data_path=F"
    assert placed(["main.py", "training.lr=1"], "F")[-1] == "data.offline_data_path=F"
    assert placed(["main.py", "--data=@hsstream/x"], "F") == ["main.py", "--data=F/x"]


def test_a_script_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "modelopt", "--root", "nowhere", "--", "nowhere.py"]) == 2
    assert "name the training script" in capsys.readouterr().err
