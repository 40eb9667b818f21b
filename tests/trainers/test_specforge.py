"""SpecForge's own reader, normaliser, collator and step against ours, on the same prepared files."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import specforge_on_cpu
import torch
from samples import bits
from sources import write_specforge
from specforge.algorithms.common import dflash_family_data as dflash
from specforge.algorithms.eagle3 import data as eagle3
from specforge.data.preprocessing import OfflineEagle3Dataset, process_token_dict_to_mappings
from specforge.data.utils import DataCollatorWithPadding
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore, load_feature_file
from specforge.training.vocab_mapping import count_effective_feature_tokens
from verifier import (
    VOCAB,
    config,
    follow_the_refusal,
    made_samples,
    model_of,
    pack_at_once,
    packed,
    save_verifier,
)

from hsstream.errors import ResumeError, SampleError, SchemaMismatchError
from hsstream.plan import Order
from hsstream.sources.base import Options
from hsstream.trainers.specforge import SpecForgeBatches, Usp
from hsstream.vocab import find_map
from hsstream.writer import ShardWriter

MAX_LENGTH = 48  # shorter than some samples
STRATEGIES = ("eagle3", "dflash", "domino", "dspark")
Files = tuple[str, Path, Path]


@pytest.fixture(scope="module", params=STRATEGIES)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """(strategy, its prepared files, the data set packed from them)."""
    strategy = request.param
    folder = tmp_path_factory.mktemp(strategy)
    layout = "dflash" if strategy == "domino" else strategy
    write_specforge(folder / "files", made_samples(), layout)
    options = Options(hidden_size=64)
    return strategy, folder / "files", packed(folder / "files", folder / "root", "specforge", options)


def loader(
    strategy: str, files: Path, batch_size: int = 1, max_length: int = MAX_LENGTH
) -> FeatureDataLoader:
    """SpecForge's loader over its files, in the order of their names."""
    settings = {"run_id": "run", "ttt_length": 7, "max_len": max_length}
    if strategy == "eagle3":
        reader = eagle3.build_offline_reader(str(files), **settings)
        normalise, collate = eagle3.build_offline_normalizer(max_length), eagle3.build_offline_collator()
    elif strategy == "dspark":
        reader = dflash.build_dspark_offline_reader(strategy, str(files), **settings)
        normalise = dflash.build_dspark_offline_normalizer(max_length)
        collate = dflash.build_dspark_collator()
    else:
        reader = dflash.build_offline_reader(strategy, str(files), **settings)
        normalise, collate = dflash.build_offline_normalizer(max_length), dflash.build_collator()
    refs = [ref for ref in reader.read() if "vocab_mapping" not in ref.feature_store_uri]
    return FeatureDataLoader(
        LocalFeatureStore("run"), refs=refs, batch_size=batch_size, collate_fn=collate,
        per_sample_transform=normalise, strategy=strategy,
    )  # fmt: skip


def equal(ours: TrainBatch, theirs: TrainBatch) -> None:
    assert isinstance(ours, TrainBatch)
    assert ours.strategy == theirs.strategy
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, value in theirs.tensors.items():
        assert bits(ours.tensors[name]) == bits(value), name
    assert {name: ours.metadata[name] for name in theirs.metadata} == theirs.metadata


def ours(prepared: Files, batch_size: int = 1, **options: Any) -> SpecForgeBatches:
    strategy, _, root = prepared
    settings = {"max_length": MAX_LENGTH, "rank": 0, "world_size": 1} | options
    return SpecForgeBatches(root, strategy, batch_size, **settings)


def test_batches_are_those_of_its_loader(prepared: Files) -> None:
    strategy, files, _ = prepared
    mine = ours(prepared, 3, order=Order(shuffle=False))
    real = list(loader(strategy, files, 3))
    assert len(mine) == len(real) == 2  # of eight samples; the partial batch is left out
    for a, b in zip(mine, real, strict=True):
        equal(a, b)


def test_shuffled_batches_are_its_collations_of_the_same_samples(prepared: Files) -> None:
    strategy, files, _ = prepared
    theirs = loader(strategy, files)
    by_key = {f"data_{number}": ref for number, ref in enumerate(theirs._refs)}
    seen = []
    for batch in ours(prepared, 2, order=Order(seed=3)):
        equal(batch, theirs._make_batch([by_key[key] for key in batch.sample_ids]))
        assert batch.metadata["supervised_tokens"] == int(batch.tensors["loss_mask"].sum())
        seen += batch.sample_ids
    assert sorted(seen) == sorted(by_key)


def test_epochs_differ_and_seek_continues(prepared: Files) -> None:
    batches = ours(prepared, 2)
    epochs = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        epochs.append([batch.sample_ids for batch in batches])
    assert epochs[0] != epochs[1]
    batches.set_epoch(1)
    batches.seek(3)
    assert [batch.sample_ids for batch in batches] == epochs[1][3:]
    batches.set_epoch(0)
    assert [batch.sample_ids for batch in batches] == epochs[0]
    with pytest.raises(ResumeError, match="step 5 of an epoch that has 4"):
        batches.seek(5)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_take_equal_steps_of_full_batches(prepared: Files, world: int) -> None:
    ranks = [ours(prepared, 3, rank=rank, world_size=world) for rank in range(world)]
    taken = [[batch.sample_ids for batch in rank] for rank in ranks]
    assert {len(steps) for steps in taken} == {len(ranks[0])} == {2 // world}
    keys = [key for steps in taken for step in steps for key in step]
    assert len(set(keys)) == len(keys) == 3 * world * (2 // world)


def test_what_its_normaliser_would_raise_on_is_left_out(tmp_path: Path) -> None:
    made = made_samples((20, 30, 25, 18))
    made[1]["loss_mask"] = torch.arange(30) % 2 == 0  # never two side by side
    made[2]["loss_mask"] = torch.arange(25) >= 24  # one, beyond what is kept
    write_specforge(tmp_path / "files", made, "dflash")
    root = packed(tmp_path / "files", tmp_path / "root", "specforge", Options(hidden_size=64))
    with pytest.raises(ValueError, match="two consecutive supervised"):
        list(loader("dflash", tmp_path / "files", max_length=20))
    batches = SpecForgeBatches(root, "dflash", 1, 20, rank=0, world_size=1)
    assert sorted(batch.sample_ids[0] for batch in batches) == ["data_0", "data_3"]
    assert batches.dropped == {"untrainable": 2}


def test_stored_padding_changes_no_supervised_place(tmp_path: Path) -> None:
    """Files padded to 64 as their writer's batches were: what is trimmed carried no loss."""
    write_specforge(tmp_path / "files", made_samples(), length=64)
    root = packed(tmp_path / "files", tmp_path / "root", "specforge")
    theirs = list(loader("eagle3", tmp_path / "files", max_length=64))
    mine = SpecForgeBatches(root, "eagle3", 1, 64, order=Order(shuffle=False), rank=0, world_size=1)
    for a, b in zip(mine, theirs, strict=True):
        tokens = a.tensors["input_ids"].shape[1]
        assert int(b.tensors["loss_mask"][:, tokens:].sum()) == 0
        for name in ("input_ids", "hidden_state", "target"):
            assert bits(a.tensors[name]) == bits(b.tensors[name][:, :tokens].contiguous())


# ---------------------------------------------------------------- sequence parallelism


@pytest.mark.parametrize(("size", "ring"), [(2, 1), (2, 2), (4, 2)])
def test_slices_are_those_of_its_preprocessing(tmp_path: Path, size: int, ring: int) -> None:
    write_specforge(tmp_path / "files", made_samples((33, 50, 17, 5, 6)))
    root = packed(tmp_path / "files", tmp_path / "root", "specforge")
    files = sorted((tmp_path / "files").rglob("data_*.ckpt"))
    collate = DataCollatorWithPadding()
    collate.sp_degree, collate.ulysses_degree = size, size // ring
    for rank in range(size):
        place = Usp(rank, size, rank // (size // ring), ring)
        batches = SpecForgeBatches(
            root, "eagle3", 1, MAX_LENGTH, ttt_length=3, usp=place, order=Order(shuffle=False), rank=0,
            world_size=1,
        )  # fmt: skip
        for batch, file in zip(batches, files, strict=True):
            item = OfflineEagle3Dataset.process_data_usp(
                load_feature_file(str(file)), MAX_LENGTH, 3, sp_rank=rank, sp_size=size,
                ring_rank=place.ring_rank, sp_ring_size=ring,
            )  # fmt: skip
            theirs = collate([item])
            assert batch.tensors.keys() == theirs.keys()
            for name, value in theirs.items():
                assert bits(batch.tensors[name]) == bits(value), (file.name, rank, name)


def test_sequence_parallelism_is_eagle3s(prepared: Files) -> None:
    if prepared[0] == "eagle3":
        with pytest.raises(SampleError, match="no place"):
            ours(prepared, usp=Usp(2, 2))
    else:
        with pytest.raises(SampleError, match="serves eagle3"):
            ours(prepared, usp=Usp(0, 2))


# ---------------------------------------------------------------- refusals


def test_other_data_and_strategies_are_refused(prepared: Files) -> None:
    with pytest.raises(SchemaMismatchError, match="missing 2"):
        ours(prepared, layers=(1, 2, 4))
    with pytest.raises(SchemaMismatchError, match="hidden size 128"):
        ours(prepared, hidden_size=128)
    with pytest.raises(SampleError, match="not 'peagle'"):
        SpecForgeBatches(prepared[2], "peagle")
    with pytest.raises(SampleError, match="whole weights"):
        SpecForgeBatches([(prepared[2], 0.5)], prepared[0], max_length=MAX_LENGTH)


# ---------------------------------------------------------------- training


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier's folder with the index of weights that SpecForge looks for."""
    folder = save_verifier(tmp_path_factory.mktemp("target"))
    weights = {"weight_map": {"lm_head.weight": "model.safetensors"}}
    weights["weight_map"]["model.embed_tokens.weight"] = "model.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    return folder


def ten_losses(batches: Iterable[TrainBatch], target: Path) -> list[float]:
    """Losses of ten steps of its EAGLE-3 strategy; the same weights at every call."""
    specforge_on_cpu.install()
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.training.strategies.base import Eagle3TrainStrategy

    torch.manual_seed(1)
    draft = LlamaForCausalLMEagle3(config(num_hidden_layers=1, draft_vocab_size=VOCAB))
    model = OnlineEagle3Model(draft, length=2, attention_backend="sdpa").to(torch.bfloat16)
    strategy = Eagle3TrainStrategy(model, target_head=TargetHead.from_pretrained(str(target)))
    return specforge_on_cpu.ten_losses(strategy, model, batches)


def test_ten_steps_have_the_same_losses(tmp_path: Path, target: Path) -> None:
    write_specforge(tmp_path / "files", made_samples())
    root = packed(tmp_path / "files", tmp_path / "root", "specforge")
    mine = SpecForgeBatches(root, "eagle3", 2, MAX_LENGTH, order=Order(shuffle=False), rank=0, world_size=1)
    losses = ten_losses(list(loader("eagle3", tmp_path / "files", 2)), target)
    assert ten_losses(mine, target) == losses
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------- its command line


def run_config(folder: Path, target: Path, **training: Any) -> Path:
    """A config of `specforge train` for ten steps of EAGLE-3 on a CPU."""
    draft = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCAB, "draft_vocab_size": 40, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "head_dim": 16,
    }  # fmt: skip
    (folder / "draft.json").write_text(json.dumps(draft))
    settings = {
        "strategy": "eagle3", "batch_size": 2, "num_epochs": 3, "max_steps": 10, "log_interval": 1,
        "attention_backend": "sdpa", "fsdp_sharding": "NO_SHARD", "ttt_length": 2, "seed": 5,
        "learning_rate": 1e-3, "save_interval": 5,
    }  # fmt: skip
    run = {
        "run_id": "run",
        "output_dir": str(folder / "out"),
        "model": {"target_model_path": str(target), "draft_model_config": str(folder / "draft.json")},
        "data": {"hidden_states_path": "files", "max_length": MAX_LENGTH, "cache_dir": str(folder / "cache")},
        "training": settings | training,
    }
    (folder / "run.json").write_text(json.dumps(run))
    return folder / "run.json"


def launched(
    folder: Path, root: Path, *words: str, before: Sequence[str] = (), eval_root: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`hsstream train specforge` in a process of its own; before: words for Python that start it."""
    command = [
        sys.executable,
        *before,
        str(Path(specforge_on_cpu.__file__)),
        "train",
        "specforge",
        "--root",
        str(root),
        *([] if eval_root is None else ["--eval-root", str(eval_root)]),
    ]
    return subprocess.run(
        [*command, "--", *words], cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"SPECFORGE_DEVICE": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def losses_of(output: str) -> dict[int, float]:
    found = re.findall(r"^step (\d+): .*?'(?:train/)?loss': ([0-9.e+-]+)", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_its_command_line_trains_and_resumes_on_a_root(tmp_path: Path, target: Path) -> None:
    write_specforge(tmp_path / "files", made_samples())
    root = packed(tmp_path / "files", tmp_path / "root", "specforge")
    run = str(run_config(tmp_path, target))
    done = launched(tmp_path, root, "--config", run)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = losses_of(done.stdout)
    assert sorted(losses) == list(range(1, 11)), done.stdout[-2000:]
    (cached,) = (tmp_path / "cache").rglob("*.pt")
    kept = find_map(cached, VOCAB)
    assert kept is not None
    counts = count_effective_feature_tokens(str(tmp_path / "files"), max_length=MAX_LENGTH)
    assert len(set(counts.values())) < len(counts)  # some tie
    assert kept.d2t.tolist() == process_token_dict_to_mappings(counts, 40, VOCAB)[0].tolist()

    (checkpoint,) = (tmp_path / "out").rglob("*step*5")
    again = launched(tmp_path, root, "--config", run, f"training.resume_from={checkpoint}")
    assert again.returncode == 0, again.stderr[-3000:]
    assert losses_of(again.stdout) == {step: loss for step, loss in losses.items() if step > 5}

    other = packed(tmp_path / "files", tmp_path / "other", "specforge", Options(ttt_length=1))
    with ShardWriter(other, name="more", codec="planes", model=model_of(other)) as writer:
        writer.write("one-more", made_samples((20,))[0])
    wrong = launched(tmp_path, other, "--config", run, f"training.resume_from={checkpoint}")
    assert wrong.returncode != 0
    assert "hsstream_fingerprint" in wrong.stderr or "dataset_size" in wrong.stderr


def test_several_ranks_are_started_through_the_launcher(tmp_path: Path, target: Path) -> None:
    write_specforge(tmp_path / "files", made_samples((20,)))
    root = packed(tmp_path / "files", tmp_path / "root", "specforge")
    run = str(run_config(tmp_path, target))
    done = launched(tmp_path, root, "--config", run, "--plan", "deployment.trainer.nproc_per_node=2")
    assert done.returncode == 0, done.stderr[-3000:]
    (command,) = json.loads(done.stdout)["commands"]
    words = " ".join(command["argv"])
    assert "-m torch.distributed.run --no-python" in words
    assert f"-m hsstream.cli train specforge --root {root} -- train --config {run}" in words


def test_two_ranks_take_the_same_number_of_steps_together(tmp_path: Path, target: Path) -> None:
    """Under torchrun, gloo between two processes: what `deployment.trainer.nproc_per_node=2` starts."""
    write_specforge(tmp_path / "files", made_samples())
    root = packed(tmp_path / "files", tmp_path / "root", "specforge")
    run = str(run_config(tmp_path, target, max_steps=5))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={port}"]
    done = launched(
        tmp_path, root, "--config", run, "deployment.trainer.nproc_per_node=2",
        before=("-m", "torch.distributed.run", *place),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    # Both ranks print every step, with the loss they agree on; one may begin within a line of the other.
    steps = re.findall(r"step (\d+): .*?'loss': ([0-9.e+-]+)", done.stdout)
    assert sorted(int(step) for step, _ in steps) == [n for n in range(1, 6) for _ in range(2)]
    assert len(set(steps)) == 5


def test_layers_that_the_draft_model_reads_must_be_stored(tmp_path: Path, target: Path) -> None:
    write_specforge(tmp_path / "files", made_samples((20, 30)))
    root = packed(tmp_path / "files", tmp_path / "root", "specforge", aux_layer_ids=[2, 3, 4])
    done = launched(tmp_path, root, "--config", str(run_config(tmp_path, target)))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "hsstream: SpecForge's eagle3 reads the outputs of layers 1"
    )


def evaluations(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"'eval/avg_loss': ([0-9.e+-]+)", output)]


def test_evaluations_see_every_sample(tmp_path: Path, target: Path) -> None:
    """As its own command does on the files: the last batch, which is not full, is part of the mean."""
    write_specforge(tmp_path / "files", made_samples())
    write_specforge(tmp_path / "held", made_samples((40, 33, 21), seed=7))
    root = packed(tmp_path / "files", tmp_path / "root", "specforge")
    held = packed(tmp_path / "held", tmp_path / "held-root", "specforge")
    # Steps that change nothing, and the whole vocabulary: both judge the weights that they begin with.
    run = str(run_config(tmp_path, target, max_steps=2, learning_rate=1e-30))
    draft = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps(draft | {"draft_vocab_size": VOCAB}))
    mine = launched(tmp_path, root, "--config", run, "training.eval_interval=2", eval_root=held)
    assert mine.returncode == 0, mine.stderr[-3000:]
    code = "import sys, specforge_on_cpu as s; s.install(); from specforge.cli import main; sys.exit(main())"
    places = ["data.hidden_states_path=files", "data.eval_hidden_states_path=held", "output_dir=theirs"]
    places.append("training.eval_interval=2")
    theirs = subprocess.run(
        [sys.executable, "-c", code, "train", "--config", run, *places], cwd=tmp_path, capture_output=True,
        text=True, timeout=300, check=False,
        env=os.environ | {"SPECFORGE_DEVICE": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr[-3000:]
    assert len(evaluations(mine.stdout)) == 1
    assert evaluations(mine.stdout) == pytest.approx(evaluations(theirs.stdout), rel=1e-5)


def test_evaluations_without_data_are_refused(tmp_path: Path, target: Path) -> None:
    write_specforge(tmp_path / "files", made_samples((20, 30)))
    root = packed(tmp_path / "files", tmp_path / "root", "specforge")
    run = str(run_config(tmp_path, target))
    words = ["training.eval_interval=2", "data.eval_hidden_states_path=elsewhere"]
    done = launched(tmp_path, root, "--config", run, *words)
    assert done.returncode == 2
    assert "--eval-root ROOT" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("layers", ["1,3,4", None])
def test_a_newcomer_reaches_the_first_step(tmp_path: Path, target: Path, layers: str | None) -> None:
    """One pack, one train; packed without --aux-layers, the command that the refusal names comes between."""
    write_specforge(tmp_path / "files", made_samples())
    root = tmp_path / "root"
    pack_at_once(tmp_path / "files", root, layers=layers)
    assert not list((tmp_path / "files").rglob("data_*"))
    run = str(run_config(tmp_path, target, max_steps=1))
    if layers is None:
        refused = launched(tmp_path, root, "--config", run)
        assert refused.returncode != 0
        follow_the_refusal(refused.stderr, root)
    done = launched(tmp_path, root, "--config", run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(losses_of(done.stdout)) == [1]
