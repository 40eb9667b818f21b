"""`hsstream train modelopt`: a training script of Model-Optimizer, with a root in place of dumped files.

In: roots, the path of the script (`examples/speculative_decoding/main.py` of its repository) and the script's
own words. Out: an exit code. While the script runs, `OfflineSupervisedDataset` makes our samples, and the
Hugging Face trainer tells them which layers its model reads. Scripts look for dumped files before they make
the data set: `@hsstream` among the words becomes a folder with one; without it the usual option is added.
Refused: what the adapter refuses.

Several ranks: `torchrun ... -m hsstream.cli train modelopt --root ROOT -- main.py ARGS...`.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hsstream.errors import SampleError
from hsstream.trainers.base import option, require
from hsstream.trainers.modelopt import ModelOptSamples
from hsstream.trainers.patch import replaced

PLACE = "@hsstream"


def launch(roots: Sequence[str], words: Sequence[str], storage_options: dict[str, Any] | None = None) -> int:
    """Run `python WORDS...` on the roots.

    Raises:
        SampleError, SchemaMismatchError: no such script; Model-Optimizer is missing or of another
            version; the data do not fit.
    """
    if not words or not Path(words[0]).is_file():
        raise SampleError(
            "name the training script behind --, such as Model-Optimizer's "
            f"examples/speculative_decoding/main.py; found {words[0] if words else 'nothing'!r}"
        )
    utils = require("modelopt.torch.speculative.eagle.utils")
    trainer = require("transformers").Trainer

    size = _sample_size(words)

    def dataset(dumped_files: Any, answer_only_loss: bool = False, tokenizer: Any = None) -> ModelOptSamples:
        del dumped_files, tokenizer
        select = None if size is None else slice(size)
        return ModelOptSamples(list(roots), answer_only_loss, select=select, storage_options=storage_options)

    changes = [
        (utils, "OfflineSupervisedDataset", dataset),
        (trainer, "__init__", _binding(trainer.__init__)),
        (sys, "path", [str(Path(words[0]).resolve().parent), *sys.path]),
    ]
    with tempfile.TemporaryDirectory(prefix="hsstream-") as folder:
        (Path(folder) / "hsstream.pt").touch()
        with replaced(*changes, (sys, "argv", _placed(words, folder))):
            runpy.run_path(words[0], run_name="__main__")
    return 0


def _binding(init: Any) -> Any:
    """`Trainer.__init__`, after which our samples know the model."""

    def bound(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if isinstance(self.train_dataset, ModelOptSamples):
            self.train_dataset.bind(self.model, getattr(self.data_collator, "train_len", None))

    return bound


def _sample_size(words: Sequence[str]) -> int | None:
    """How many samples the script shall train on: `data.sample_size` of a recipe or its overrides, or
    `--sample_size`; None for all. Scripts cut their list of files by it, which is not read here."""
    config = option(words, "--config")
    overrides = [word for word in words[1:] if "=" in word and not word.startswith("-")]
    if config is not None:
        size = require("modelopt.recipe").load_recipe(config, overrides=overrides).data.sample_size
    else:
        size = int(option(words, "--sample_size") or -1)
    return size if size > 0 else None


def _placed(words: Sequence[str], folder: str) -> list[str]:
    """The script's words with the folder that it shall look into for dumped files."""
    if any(PLACE in word for word in words):
        return [word.replace(PLACE, folder) for word in words]
    dotted = any("." in word.partition("=")[0] for word in words[1:] if "=" in word)
    recipe = dotted or option(words, "--config") is not None
    more = [f"data.offline_data_path={folder}"] if recipe else ["--offline_data_path", folder]
    return [*words, *more]
