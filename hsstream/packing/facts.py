"""Model facts that lie beside the files, and those that a trainer will miss.

In: the folder of a source, folders of the model itself. Out: facts by the names of ModelInfo; lines that say
which are missing and how to give them. Refused: nothing; a file that cannot be read says nothing, and a
configuration of another width belongs to another model (SpecForge's draft model, say).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hsstream.errors import SampleError
from hsstream.sample import ModelInfo
from hsstream.sources.base import Loaded
from hsstream.sources.torchfile import load_torch
from hsstream.weights import read_config

#: What a Hugging Face configuration calls them.
_CONFIG = {"num_hidden_layers": "num_layers", "vocab_size": "vocab_size"}
#: A configuration beside the files with no more layers is a draft model's.
MAX_DRAFT_LAYERS = 1
#: Where SpecForge puts the map of its draft vocabulary: its `t2d` is as long as the target's vocabulary.
VOCABULARY_MAPS = ("vocab_mapping/vocab_mapping.pt", "vocab_mapping.pt")


def facts_beside(
    root: Path, folders: Iterable[Path], known: Mapping[str, Any], captured: int
) -> dict[str, Any]:
    """Facts of a model of the width in `known`, from its own folder or from what lies at the source.

    captured: its captured layers.
    """
    facts: dict[str, Any] = {}
    for folder in (*folders, root):
        found = _of_config(folder, known.get("hidden_size"))
        if folder == root and found.get("num_layers", 0) <= max(MAX_DRAFT_LAYERS, captured):
            continue
        facts = found | facts
    if "vocab_size" not in facts and (size := _mapped_vocabulary(root)) is not None:
        facts["vocab_size"] = size
    return facts


def missing_facts(model: ModelInfo, first: Loaded) -> list[str]:
    """What a trainer will ask for and nothing tells, a line each."""
    lines = []
    aux = first.tensors.get("aux_hidden_states")
    if aux is not None and model.aux_layer_ids is None:
        example = ",".join(["ID"] * aux.shape[1])
        lines.append(
            f"record aux_layer_ids: --aux-layers {example}, the captured layers in their order; without it "
            "`train` for SpecForge, speculators and Model-Optimizer refuses the data set"
        )
    if model.vocab_size is None and "input_ids" in first.tensors:
        lines.append(
            "vocab_size is not known: `vocab` will ask for --vocab-size; --model FOLDER, with the captured "
            "model in it, records it"
        )
    return lines


def _of_config(folder: Path, width: int | None) -> dict[str, Any]:
    try:
        config = read_config(folder) if (folder / "config.json").is_file() else {}
    except (SampleError, RecursionError):
        return {}
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    if width is None or config.get("hidden_size") != width or "draft_vocab_size" in config:
        return {}
    return {fact: config[name] for name, fact in _CONFIG.items() if type(config.get(name)) is int}


def _mapped_vocabulary(root: Path) -> int | None:
    for name in VOCABULARY_MAPS:
        try:
            found = load_torch(root / name, ("t2d",)) if (root / name).is_file() else {}
        except (SampleError, OSError):
            continue
        taken = found.get("t2d") if isinstance(found, dict) else None
        if taken is not None and taken.ndim == 1:
            return len(taken)
    return None
