"""`hsstream train specforge`: SpecForge's own command line, with a root in place of its feature files.

In: roots and the words of `specforge train`. Out: its exit code. Its loader, and the count that its draft
vocabulary is made from, are replaced while it runs; everything else is SpecForge's: config, models,
optimizer, checkpoints, `--plan`, several ranks (each is started through this launcher). Refused: what the
adapter refuses, once the draft model says which layers it reads; a resumed run on other data.

A draft checkpoint that is trained on keeps the vocabulary map it has.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hsstream.catalog import open_catalog
from hsstream.errors import SampleError
from hsstream.plan import Order
from hsstream.trainers.base import require
from hsstream.trainers.patch import replaced
from hsstream.trainers.specforge import SpecForgeBatches, Usp
from hsstream.vocab import count_tokens_by_file, find_map


def launch(
    roots: Sequence[str],
    words: Sequence[str],
    storage_options: dict[str, Any] | None = None,
    eval_roots: Sequence[str] = (),
) -> int:
    """Run `specforge train WORDS...` on the roots.

    eval_roots: data for the evaluations that the config asks for.

    Raises:
        SampleError, SchemaMismatchError: SpecForge is missing or of another version; the data do not fit.
    """
    cli, plans = require("specforge.cli", "main"), require("specforge.launch_plan")
    assembly, launcher = require("specforge.training.assembly"), require("specforge.launch")
    run = _Run(roots, eval_roots, storage_options, launcher)
    again = partial(
        plans.build_launch_plan,
        worker_prefix=_again(roots, eval_roots, storage_options),
        torchrun_prefix=(sys.executable, "-m", "torch.distributed.run", "--no-python"),
    )
    changes = (
        (plans, "build_launch_plan", again),
        (assembly, "_ensure_offline_vocab_mapping", run.install_vocabulary),
        (launcher, "build_offline_runtime", run.build),
    )
    words = list(words) if "train" in words[:1] else ["train", *words]
    # SpecForge asks for these places before it reads them; the roots stand there, and are read by us.
    words.append(f"data.hidden_states_path={roots[0]}")
    if eval_roots:
        words.append(f"data.eval_hidden_states_path={eval_roots[0]}")
    with replaced(*changes):
        return int(cli.main(words))


def _again(
    roots: Sequence[str], eval_roots: Sequence[str], storage_options: dict[str, Any] | None
) -> tuple[str, ...]:
    """The command that starts one more process of the same run."""
    words = [sys.executable, "-m", "hsstream.cli", "train", "specforge"]
    for root in roots:
        words += ["--root", root]
    for root in eval_roots:
        words += ["--eval-root", root]
    for name, value in (storage_options or {}).items():
        words += ["--storage-option", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return (*words, "--")


class _Run:
    """One training run: what SpecForge decides about it, and the data set in the place of its files."""

    def __init__(
        self,
        roots: Sequence[str],
        eval_roots: Sequence[str],
        storage_options: dict[str, Any] | None,
        launcher: Any,
    ) -> None:
        self._roots, self._eval_roots = list(roots), list(eval_roots)
        self._options, self._launcher = storage_options, launcher
        self._draft: tuple[tuple[int, ...], int] | None = None

    def install_vocabulary(self, config: Any, bundle: Any, algorithm: Any) -> None:
        """In place of counting the feature files. The models exist by now: take their layers and width."""
        targets = require("specforge.modeling.target.target_utils")
        target = targets.load_target_config(
            config.model.target_model_path,
            cache_dir=config.model.cache_dir,
            trust_remote_code=config.model.trust_remote_code,
        )
        model = algorithm.providers.model
        layers = model.resolve_capture_layers(config, bundle.draft_config, target)
        self._draft = tuple(layers), bundle.target_hidden_size
        if bundle.draft_vocab_size == bundle.target_vocab_size or config.model.vocab_mapping_path:
            return
        if not algorithm.providers.vocab_mapping_modes or self._has_map(config, bundle):
            return
        assembly = require("specforge.training.assembly")
        assembly._install_dataset_vocab_mapping(
            config, bundle, counts=self._counts(config, bundle), dataset_identity=self._identity(config)
        )

    def _has_map(self, config: Any, bundle: Any) -> bool:
        """Whether the draft was loaded from a checkpoint that has a map, which came with the weights."""
        checkpoint = config.model.draft_checkpoint_path
        if not checkpoint or not Path(checkpoint).exists():
            return False
        found = find_map(checkpoint, bundle.target_vocab_size) is not None
        if found:
            bundle.draft_model.vocab_mapping_loaded = True
        return found

    def _counts(self, config: Any, bundle: Any) -> Counter[int]:
        size, limit = bundle.target_vocab_size, config.data.max_length
        # Of equally frequent tokens its Counter takes those that came first: in its own sequence of files.
        return Counter(count_tokens_by_file(self._roots, size, self._options, limit))

    def _identity(self, config: Any) -> str:
        """What its cache of maps shall know the data by."""
        digests = open_catalog(self._roots, self._options).digests()
        return json.dumps({"kind": "hsstream", "indexes": digests, "max_length": config.data.max_length})

    def build(self, **settings: Any) -> Any:
        """In place of `build_offline_runtime`: its trainer, over our batches."""
        if self._draft is None:
            raise SampleError("SpecForge built its trainer before its models: another version than is known")
        usp = settings.pop("use_usp_preprocess", False)
        seed, algorithm = settings.pop("seed", 0), settings["algorithm"]
        made = partial(self._batches, settings, algorithm.name, usp)
        self._check_evaluation(settings)
        batches = made(self._roots, Order(seed=seed))
        for name in ("hidden_states_path", "eval_hidden_states_path", "eval_data_factory"):
            settings.pop(name, None)
        evaluation = None
        if self._eval_roots:
            evaluation = partial(made, self._eval_roots, Order(shuffle=False, tail="repeat"), drop_last=False)
        trainer = self._assemble(settings, batches, evaluation, seed)
        trainer._loader = batches
        return trainer

    def _check_evaluation(self, settings: dict[str, Any]) -> None:
        if settings.get("eval_interval") and not self._eval_roots:
            raise SampleError(
                "training.eval_interval is set, and data.eval_hidden_states_path is not read here: name the "
                "data of evaluations by --eval-root ROOT, or set training.eval_interval=0"
            )

    def _batches(
        self,
        settings: dict[str, Any],
        strategy: str,
        usp: bool,
        roots: list[str],
        order: Order,
        drop_last: bool = True,
    ) -> SpecForgeBatches:
        layers, hidden_size = self._draft or ((), 0)
        rank, world_size, place = _topology(usp)
        return SpecForgeBatches(
            roots,
            strategy,
            settings.get("batch_size", 1),
            settings.get("max_len", 2048),
            layers,
            hidden_size,
            settings.get("ttt_length", 7),
            place,
            order=order,
            storage_options=self._options,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            threads=max(1, settings.get("dataloader_num_workers", 0) or 2),
        )

    def _assemble(
        self,
        settings: dict[str, Any],
        batches: SpecForgeBatches,
        evaluation: Callable[[], Any] | None,
        seed: int,
    ) -> Any:
        launcher, size = self._launcher, settings.get("batch_size", 1)
        control = require("specforge.runtime.control_plane")
        planes = require("specforge.runtime.control_plane.metadata_store")
        store = require("specforge.runtime.data_plane.feature_store", "LocalFeatureStore").LocalFeatureStore
        run_id, algorithm = settings["run_id"], settings["algorithm"]
        head = settings.pop("target_head") if algorithm.providers.step.uses_external_target_head else None
        settings.pop("target_head", None)
        for name in ("modality", "ttt_length", "max_len"):
            settings.pop(name, None)
        return launcher._assemble_trainer(
            controller=control.DataFlowController(
                run_id, metadata_store=planes.NoOpMetadataStore(), enable_sample_queue=False
            ),
            store=store(run_id),
            # Its schedule counts references; its loader, which would read them, is replaced.
            ref_source={"refs": [None] * (len(batches) * size)},
            model=settings.pop("draft_model"),
            target_head=head,
            eval_data_factory=evaluation,
            collate_fn=None,
            durable_ack=False,
            checkpoint_extra={
                "hsstream_fingerprint": batches.dataset.state_dict()["fingerprint"],
                "sampler_seed": seed,
            },
            **settings,
        )


def _topology(usp: bool) -> tuple[int, int, Usp | None]:
    """(data-parallel rank, ranks, place in sequence parallelism) of this process."""
    import torch.distributed as dist  # noqa: PLC0415  (with the trainer)

    if not dist.is_available() or not dist.is_initialized():
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), None
    groups = require("specforge.distributed")
    group = groups.get_draft_dp_group() if usp else groups.get_dp_group()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if not usp:
        return rank, size, None
    sequence, ring = groups.get_draft_sp_group(), groups.get_sp_ring_group()
    place = Usp(
        dist.get_rank(sequence), dist.get_world_size(sequence), dist.get_rank(ring), dist.get_world_size(ring)
    )
    return rank, size, place
