"""speculators' own data set, sampler, collator and model against ours, on the same vLLM dumps."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hs_connectors import FileTransfer, HiddenStatesBackend
from samples import bits
from sources import write_speculators
from verifier import (
    DEPTH,
    HIDDEN,
    VOCAB,
    follow_the_refusal,
    made_samples,
    pack_at_once,
    packed,
    save_verifier,
)

# Before speculators.train.config, which looks at the registered backends as it is imported.
import hsstream.trainers.speculators as adapter  # isort: skip

from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.config import TrainConfig
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.dataloader import _setup_dataloader
from speculators.train.trainer import Trainer, TrainerConfig

from hsstream.catalog import open_catalog
from hsstream.cli import main
from hsstream.errors import SampleError, SchemaMismatchError, StorageError
from hsstream.plan import Order
from hsstream.sample import ModelInfo
from hsstream.sources.base import Options
from hsstream.trainers.speculators_launch import Preprocessed, _words
from hsstream.trainers.speculators_stream import SpeculatorsBatches, SpeculatorsLoader
from hsstream.writer import ShardWriter

#: As speculators counts what `LAYERS` counts from 0; its default for eight layers.
LAYERS = (2, 4, 5)
SEQ_LEN = 120

Files = tuple[Path, Path]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """(the folder of the dumps and the Arrow data set, the data set packed from them)."""
    folder = tmp_path_factory.mktemp("speculators")
    write_speculators(folder / "files", made_samples())
    return folder / "files", pack_dumps(folder / "files", folder / "root")


def pack_dumps(files: Path, root: Path) -> Path:
    rows = datasets.load_from_disk(str(files / "arrow"))
    # As `speculators prepare-data` leaves it.
    rows.with_format("torch").save_to_disk(str(files / "data"))
    options = Options(arrow=files / "data")
    return packed(files / "hidden_states", root, "speculators", options, aux_layer_ids=LAYERS)


def own(files: Path, transfer: Any = None, **options: Any) -> ArrowDataset:
    """speculators' data set, reading its files, or whatever the transfer gives."""
    transfer = transfer or FileTransfer(files / "hidden_states")
    return ArrowDataset(SEQ_LEN, files / "data", transfer, on_missing="raise", **options)


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert bits(ours[name]) == bits(value), name
        else:
            assert ours[name] == value, name


def test_its_data_set_gives_the_same_items_on_our_backend(dumped: Files) -> None:
    files, root = dumped
    theirs, ours = own(files), own(files, adapter.Transfer(str(root), str(files / "data"), LAYERS, HIDDEN))
    for number in range(len(theirs)):
        equal(ours[number], theirs[number])


@pytest.mark.parametrize("workers", [0, 2])
def test_its_loader_gives_the_same_batches_on_our_backend(dumped: Files, workers: int) -> None:
    files, root = dumped

    def batches(transfer: Any, count: int) -> list[list[dict[str, Any]]]:
        loader = _setup_dataloader(
            own(files, transfer), SEQ_LEN, HIDDEN, num_workers=count, preprocess=shift_batch, seed=5
        )
        epochs = []
        for epoch in range(2):
            loader.batch_sampler.set_epoch(epoch)
            epochs.append(list(loader))
        return epochs

    ours = batches(adapter.Transfer(str(root), str(files / "data"), LAYERS), workers)
    for mine, real in zip(ours, batches(None, 0), strict=True):
        for a, b in zip(mine, real, strict=True):
            equal(a, b)


def test_rows_are_found_by_their_tokens(dumped: Files, tmp_path: Path) -> None:
    """Samples in another order, under other keys, with others between, one of them missing."""
    files, _ = dumped
    made = made_samples()
    others = made_samples((9, 11), seed=7)
    info = open_catalog(dumped[1], None).first.index.info
    with ShardWriter(tmp_path / "root", codec="planes", model=info.model) as writer:
        for number, each in enumerate([others[0], *made[:2:-1], others[1], *made[1:3]]):
            writer.write(f"any-{number}", each)
    transfer = adapter.Transfer(str(tmp_path / "root"), str(files / "data"), LAYERS)
    theirs, ours = own(files), own(files, transfer)
    for number in range(1, len(theirs)):
        equal(ours[number], theirs[number])
    assert transfer.get_cached(0) is None
    with pytest.raises(RuntimeError, match="sample 0"):
        ours[0]


def test_other_layers_and_another_norm_are_refused(dumped: Files, tmp_path: Path) -> None:
    files, root = dumped
    with pytest.raises(SchemaMismatchError, match="missing 0"):
        adapter.Transfer(str(root), str(files / "data"), (1, 4, 5))
    with pytest.raises(SchemaMismatchError, match="hidden size 128"):
        adapter.Transfer(str(root), str(files / "data"), LAYERS, 128)
    first = made_samples((9,))[0]
    with ShardWriter(tmp_path / "root", model=ModelInfo(last_hidden_norm="post")) as writer:
        writer.write("a", first)
    with pytest.raises(SchemaMismatchError, match="would apply it again"):
        adapter.Transfer(str(tmp_path / "root"), str(files / "data"))


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_verifier(tmp_path_factory.mktemp("verifier")))


def test_its_command_line_takes_the_backend(dumped: Files, verifier: str) -> None:
    files, root = dumped
    words = ["--verifier-name-or-path", verifier, "--data-path", str(files / "data")]
    words += ["--hidden-states-backend", "hsstream", "--hsstream-root", str(root)]
    config = TrainConfig.resolve(words)
    args = argparse.Namespace(**config.flatten())
    transfer = HiddenStatesBackend.registry["hsstream"].from_train_args(args, args.data_path)
    assert len(transfer.get_cached(0)["token_ids"]) == 33
    args.target_layer_ids = [1, 4, 5]
    with pytest.raises(SchemaMismatchError, match="missing 0"):
        adapter.Backend.from_train_args(args, args.data_path)
    args.hsstream_root = None
    with pytest.raises(SampleError, match="--hsstream-root"):
        adapter.Backend.from_train_args(args, args.data_path)


# ---------------------------------------------------------------- the stream


def collated(files: Path, keys: list[str], shift: bool, seq_len: int) -> dict[str, Any]:
    """Its own items, by its own collator."""
    theirs = own(files)
    collate = CollateFn(seq_len, HIDDEN, preprocess=shift_batch if shift else None)
    return collate([theirs[int(key.removeprefix("hs_"))] for key in keys])


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
@pytest.mark.parametrize("seq_len", [120, 45])  # the second is shorter than some samples
def test_streamed_batches_are_those_of_its_collator(dumped: Files, kind: str, seq_len: int) -> None:
    files, root = dumped
    batches = SpeculatorsBatches(root, seq_len, LAYERS, kind, order=Order(seed=2), rank=0, world_size=1)
    seen = []
    for batch in batches:
        equal(dict(batch), collated(files, batch.sample_keys, kind != "dflash", seq_len))
        assert batch.supervised_tokens == int(batch["loss_mask"].sum())
        seen += batch.sample_keys
    assert sorted(seen) == [f"hs_{number}" for number in range(8)]


def test_mtp_is_left_to_the_backend(dumped: Files) -> None:
    with pytest.raises(SampleError, match="backend"):
        SpeculatorsBatches(dumped[1], 64, speculator_type="mtp")


# ---------------------------------------------------------------- training


def draft(verifier: str) -> Eagle3DraftModel:
    """An EAGLE-3 draft model; the same weights at every call."""
    from speculators.train.cli import create_transformer_layer_config

    shape = create_transformer_layer_config(verifier, 1, "llama", None, 2048, [0])
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Eagle3DraftModel.from_training_args(
            verifier_config=shape, verifier_name_or_path=verifier, target_layer_ids=None,
            draft_vocab_size=VOCAB, norm_before_residual=True, ttt_steps=2, draft_attn_impl="sdpa",
        )  # fmt: skip


CALL = {
    "loss_fn": "kl_div", "loss_implementation": "eager", "ttt_steps": 2, "ttt_step_loss_decay": 1.0,
}  # fmt: skip


def ten_losses(batches: Iterable[dict[str, Any]], verifier: str) -> list[float]:
    model = draft(verifier).to(torch.bfloat16)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    arguments = model.get_trainer_kwargs(**CALL)[0]
    losses: list[float] = []
    while len(losses) < 10:
        for batch in batches:
            _, loss, _ = model(**batch, **arguments)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses[:10]


def test_ten_steps_have_the_same_losses(dumped: Files, verifier: str) -> None:
    files, root = dumped
    batches = SpeculatorsBatches(root, SEQ_LEN, LAYERS, order=Order(seed=4), rank=0, world_size=1)
    streamed = list(batches)
    replayed = [collated(files, batch.sample_keys, True, SEQ_LEN) for batch in streamed]
    losses = ten_losses(replayed, verifier)
    assert ten_losses(streamed, verifier) == losses
    assert losses[-1] < losses[0]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its trainer needs to run without an accelerator: a device to move batches to."""
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr("speculators.train.trainer.get_local_rank", lambda: torch.device("cpu"))
    always = property(lambda _: "cpu", lambda *_: None)
    monkeypatch.setattr(Trainer, "device_type", always, raising=False)


def test_its_trainer_runs_on_our_loader_and_resumes(
    dumped: Files, verifier: str, tmp_path: Path, on_cpu: None
) -> None:
    _, root = dumped
    batches = SpeculatorsBatches(root, SEQ_LEN, LAYERS, order=Order(seed=4), rank=0, world_size=1)
    loader = SpeculatorsLoader(batches)
    model = draft(verifier)
    seen: list[list[str]] = []
    forward = model.forward

    def noted(**batch: Any) -> Any:
        seen.append(batch["input_ids"].flatten().tolist())
        return forward(**batch)

    model.forward = noted  # type: ignore[method-assign]
    calls = model.get_trainer_kwargs(**CALL)
    settings = TrainerConfig(
        num_epochs=2, save_path=str(tmp_path), lr=1e-3, train_call_kwargs=calls[0], val_call_kwargs=calls[1],
        resume_from_checkpoint=False,
    )  # fmt: skip
    trainer = Trainer(model, settings, loader)
    trainer.train_epoch(0)
    trainer.train_epoch(1)
    expected = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        expected.append([batch["input_ids"].flatten().tolist() for batch in batches])
    assert seen == expected[0] + expected[1]
    assert expected[0] != expected[1]
    seen.clear()
    trainer.current_epoch, trainer._resume_local_step = 1, 2
    trainer.train_epoch(1)
    assert seen == expected[1][2:]
    seen.clear()
    trainer.train_epoch(0)
    assert seen == expected[0]


def test_verifier_depth_is_what_the_layers_assume() -> None:
    assert LAYERS == (2, DEPTH // 2, DEPTH - 3)


# ---------------------------------------------------------------- its command line


@pytest.mark.parametrize("stream", [False, True])
def test_its_command_line_trains_on_a_root(
    dumped: Files, verifier: str, tmp_path: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Without a preprocessed data set: it is made of the root."""
    losses: list[float] = []
    step = torch.Tensor.backward

    def noted(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(float(loss.detach()))
        step(loss, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", noted)
    words = ["--verifier-name-or-path", verifier, "--data-path", str(tmp_path / "data")]
    words += ["--save-path", str(tmp_path / "out"), "--log-dir", str(tmp_path / "log"), "--epochs", "3"]
    words += ["--total-seq-len", "120", "--num-workers", "0", "--draft-attn-impl", "sdpa", "--lr", "1e-3"]
    words += ["--loss-implementation", "eager", "--draft-vocab-size", "40", "--train-data-ratio", "0.7"]
    words += ["--ttt-steps", "2", "--full-attention-indices", "0", "--mask-token-id", "0"]
    more = ["--stream"] if stream else []
    assert main(["train", "speculators", "--root", str(dumped[1]), *more, "--", *words]) == 0
    assert len(losses) >= 6
    assert losses[-1] < losses[0]
    frequencies = torch.load(tmp_path / "data" / "token_freq.pt", weights_only=True)
    assert sum(frequencies.values()) == sum(int(each["loss_mask"].sum()) for each in made_samples())
    assert (tmp_path / "data" / "d2t-40.npy").exists()
    assert (tmp_path / "data" / "state.json").exists() != stream


def words_for(verifier: str, folder: Path, *more: str) -> list[str]:
    words = ["--verifier-name-or-path", verifier, "--data-path", str(folder / "data"), "--epochs", "1"]
    words += ["--save-path", str(folder / "out"), "--log-dir", str(folder / "log"), "--total-seq-len", "120"]
    words += ["--num-workers", "0", "--draft-attn-impl", "sdpa", "--loss-implementation", "eager"]
    words += ["--draft-vocab-size", "40", "--train-data-ratio", "0.7", "--ttt-steps", "2"]
    return [*words, "--full-attention-indices", "0", "--mask-token-id", "0", *more]


def rows_at(folder: Path) -> int:
    return len(datasets.load_from_disk(str(folder / "data")))


def test_a_root_that_has_grown_is_trained_on_whole(
    verifier: str, tmp_path: Path, on_cpu: None, caplog: pytest.LogCaptureFixture
) -> None:
    write_speculators(tmp_path / "files", made_samples((30, 40, 50)))
    root = pack_dumps(tmp_path / "files", tmp_path / "root")
    assert main(["train", "speculators", "--root", str(root), "--", *words_for(verifier, tmp_path)]) == 0
    assert rows_at(tmp_path) == 3
    with ShardWriter(
        root, name="more", codec="planes", model=open_catalog(root, None).first.index.info.model
    ) as writer:
        writer.write("one-more", made_samples((20,), seed=9)[0])
    again = words_for(verifier, tmp_path, "--no-resume-from-checkpoint")
    assert main(["train", "speculators", "--root", str(root), "--", *again]) == 0
    assert rows_at(tmp_path) == 4
    assert "made of 3 samples of up to 120 tokens; now there are 4" in caplog.text
    frequencies = torch.load(tmp_path / "data" / "token_freq.pt", weights_only=True)
    assert sum(frequencies.values()) == 15 + 20 + 25 + 10


def test_rows_of_the_users_own_are_left_as_they_are(
    dumped: Files, verifier: str, tmp_path: Path, on_cpu: None
) -> None:
    rows = made_samples()[:5]
    own = datasets.Dataset.from_list(
        [
            {"input_ids": each["input_ids"].tolist(), "loss_mask": each["loss_mask"].long().tolist(),
             "seq_len": len(each["input_ids"])}
            for each in rows
        ]
    )  # fmt: skip
    own.with_format("torch").save_to_disk(str(tmp_path / "data"))
    for _ in range(2):
        words = words_for(verifier, tmp_path, "--no-resume-from-checkpoint")
        assert main(["train", "speculators", "--root", str(dumped[1]), "--", *words]) == 0
        assert rows_at(tmp_path) == 5
    assert not (tmp_path / "data" / "hsstream.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on-missing=generate"], "needs a server"),
        (["--on-missing", "generate"], "needs a server"),
        (["--hidden-states-backend=file"], "set by `hsstream train`"),
        (["--hsstream-root", "x"], "set by `hsstream train`"),
    ],
)
def test_options_that_a_data_set_makes_meaningless_are_refused(
    dumped: Files, verifier: str, tmp_path: Path, words: list[str], message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = words_for(verifier, tmp_path, *words)
    assert main(["train", "speculators", "--root", str(dumped[1]), "--", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("word", [["--on-missing=skip"], ["--on-missing", "warn"]])
def test_what_is_missing_is_treated_as_the_trainer_is_told(word: list[str]) -> None:
    assert [each for each in _words(word, ["root"], None) if "on-missing" in each or each == "raise"] == word[
        :1
    ]


def test_a_rank_does_not_wait_for_ever(
    dumped: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(StorageError, match="rank 0 has not made"):
        Preprocessed(tmp_path, [str(dumped[1])], 120, None, wait_seconds=0).ensure(VOCAB)


def test_layers_that_the_draft_model_reads_must_be_stored(
    dumped: Files, verifier: str, tmp_path: Path, on_cpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--verifier-name-or-path", verifier, "--data-path", str(tmp_path), "--save-path", str(tmp_path)]
    words += ["--target-layer-ids", "1", "4", "5", "--draft-attn-impl", "sdpa", "--mask-token-id", "0"]
    assert main(["train", "speculators", "--root", str(dumped[1]), "--", *words]) == 1
    assert "missing 0" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("layers", ["2,4,5", None])
def test_a_newcomer_reaches_the_first_step(
    verifier: str, tmp_path: Path, on_cpu: None, layers: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """One pack, one train; packed without --aux-layers, the command that the refusal names comes between."""
    write_speculators(tmp_path / "files", made_samples())
    files, root = tmp_path / "files" / "hidden_states", tmp_path / "root"
    pack_at_once(files, root, "--arrow", str(tmp_path / "files" / "arrow"), layers=layers)
    assert not list(files.glob("hs_*"))
    words = ["train", "speculators", "--root", str(root), "--", *words_for(verifier, tmp_path)]
    if layers is None:
        assert main(words) != 0
        follow_the_refusal(capsys.readouterr().err, root)
    assert main(words) == 0
    assert list((tmp_path / "out").rglob("*.safetensors"))
