"""The layouts that `--to` takes, each as its program writes it (see the modules of `sources`).

In: samples. Out: files of one program. Refused with SampleError: what the program has no place for.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hsstream.errors import SampleError
from hsstream.export.deepspec import ToDeepSpec
from hsstream.export.layout import AUX, LAST, Layout
from hsstream.export.nemo import ToNemoDSpark
from hsstream.export.place import ARROW, STATES
from hsstream.sample import Sample
from hsstream.sources.arrow import write_rows
from hsstream.sources.base import META, MODEL
from hsstream.sources.safefile import save_safetensors

GROUP = 2000


class ToSpecForge(Layout):
    """EAGLE-3 with captured layers and the last hidden state, DFlash with layers alone."""

    norm = "post"

    def check(self) -> None:
        """EAGLE-3 and DFlash know no other tensors."""
        super().check()
        self._only(AUX, LAST)
        if AUX not in self._names:
            raise SampleError("SpecForge needs aux_hidden_states, which this data set does not have")

    def path(self, number: int, key: str) -> Path:  # noqa: ARG002
        """`rows_0-2000/data_17.ckpt`."""
        place = self._numbers[number] if self._numbers else number
        group = place // GROUP * GROUP
        return Path(f"rows_{group}-{group + GROUP}") / f"data_{place}.ckpt"

    def save(self, path: Path, sample: Sample) -> None:
        """The dict that SpecForge's offline reader takes."""
        found = sample.tensors
        record = {"input_ids": found["input_ids"], "loss_mask": found["loss_mask"].long()}
        aux = found[AUX].flatten(1)[None]
        if LAST in found:
            record |= {"hidden_state": found[LAST][None], "aux_hidden_state": aux}
        else:
            record["hidden_states"] = aux
        _save(record, path)


class ToDSpark(ToSpecForge):
    """The same files for SpecForge's DSpark strategy."""

    def check(self) -> None:
        """DSpark needs both."""
        super().check()
        if LAST not in self._names:
            raise SampleError("DSpark needs last_hidden_state, which this data set does not have")

    def save(self, path: Path, sample: Sample) -> None:
        """The dict of DSpark."""
        found = sample.tensors
        record = {"input_ids": found["input_ids"], "loss_mask": found["loss_mask"].long()}
        record["hidden_states"] = found[AUX].flatten(1)[None]
        record["target_last_hidden_states"] = found[LAST][None]
        _save(record, path)


class ToSpeculators(Layout):
    """Layers and last hidden state in one tensor, before the final norm; masks in an Arrow data set."""

    norm = "pre"

    def check(self) -> None:
        """All states in one dtype and width."""
        if self._to_post is not None:
            raise SampleError("speculators applies the final norm itself: leave --to-post-norm out")
        super().check()
        self._only(AUX, LAST)
        specs = self._reader.index.info.schema.by_name
        if LAST not in specs:
            raise SampleError("speculators needs last_hidden_state, which this data set does not have")
        if AUX in specs and (specs[AUX].dtype, specs[AUX].trailing[-1:]) != (
            specs[LAST].dtype,
            specs[LAST].trailing,
        ):
            raise SampleError("speculators keeps all states in one tensor: these differ in dtype or width")

    def path(self, number: int, key: str) -> Path:  # noqa: ARG002
        """`hidden_states/hs_17.safetensors`, 17 being the row in the Arrow data set."""
        return Path(STATES) / f"hs_{number}.safetensors"

    def save(self, path: Path, sample: Sample) -> None:
        """The two tensors of vLLM's connector."""
        found = sample.tensors
        states = [found[AUX]] if AUX in found else []
        states.append(found[LAST][:, None])
        record = {"hidden_states": torch.cat(states, dim=1), "token_ids": found["input_ids"]}
        save_safetensors(path, record, {})

    def finish(self) -> None:
        """The masks, in the order of the files."""
        with tempfile.TemporaryDirectory(dir=self._target, prefix=".arrow-") as scratch:
            write_rows(self._target / ARROW, self._rows(), Path(scratch))

    def _rows(self) -> Iterator[dict[str, Any]]:
        for number in range(len(self._reader)):
            found = self._reader.read(number, tensors=("input_ids", "loss_mask")).tensors
            ids, mask = found["input_ids"], found["loss_mask"].long()
            yield {"input_ids": ids.tolist(), "loss_mask": mask.tolist(), "seq_len": len(ids)}


class ToModelOpt(Layout):
    """Flat layers and the last hidden state, with the side of the final norm that it was taken on."""

    def check(self) -> None:
        """A file that does not name its side is taken for one after the norm."""
        super().check()
        self._only(AUX, LAST)
        if LAST not in self._names:
            raise SampleError("Model-Optimizer needs last_hidden_state, which this data set does not have")
        if self._last_norm not in ("pre", "post"):
            raise SampleError(
                "Model-Optimizer must know on which side of the final norm last_hidden_state was taken: "
                "hsstream facts ROOT --set last_hidden_norm=pre, or =post"
            )

    def path(self, number: int, key: str) -> Path:  # noqa: ARG002
        """`KEY.pt`."""
        return Path(f"{key}.pt")

    def save(self, path: Path, sample: Sample) -> None:
        """The dict of Model-Optimizer's dumps."""
        found = sample.tensors
        record = {
            "input_ids": found["input_ids"].long(),
            "hidden_states": found[LAST],
            "aux_hidden_states": found[AUX].flatten(1) if AUX in found else torch.empty(0),
            "loss_mask": found["loss_mask"].long(),
            "conversation_id": sample.key,
            "hidden_states_prenorm": self._last_norm == "pre",
        }
        _save(record, path)


class ToSafetensors(Layout):
    """Everything a sample holds, under its own names."""

    def path(self, number: int, key: str) -> Path:  # noqa: ARG002
        """`KEY.safetensors`."""
        return Path(f"{key}.safetensors")

    def save(self, path: Path, sample: Sample) -> None:
        """Tensors, metadata and model facts."""
        facts = self._model.to_dict()
        if self._to_post is not None:
            facts["last_hidden_norm"] = self._last_norm
        header = {META: _json(sample.meta, "metadata"), MODEL: _json(facts, "model facts")}
        save_safetensors(path, {n: v.contiguous() for n, v in sample.tensors.items()}, header)


#: What `--to` takes.
FORMATS: Mapping[str, type[Layout]] = {
    "specforge": ToSpecForge,
    "specforge-dspark": ToDSpark,
    "speculators": ToSpeculators,
    "modelopt": ToModelOpt,
    "deepspec": ToDeepSpec,
    "nemo-dspark": ToNemoDSpark,
    "safetensors": ToSafetensors,
}


def _save(record: dict[str, Any], path: Path) -> None:
    """torch.save by way of memory: on a full disk torch says RuntimeError, and not why."""
    whole = io.BytesIO()
    torch.save(record, whole)
    path.write_bytes(whole.getbuffer())


def _json(value: Any, what: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise SampleError(f"{what} cannot be written as JSON: {error}") from None
