"""What caches of layers and last hidden states have in common: many samples a file, and a manifest of facts.

In: a data set. Out: its captured layers and width. Refused with SampleError: tensors without a place, states
before the final norm or of two widths, a model or layers that the data set does not name.
"""

from __future__ import annotations

from hsstream.errors import SampleError
from hsstream.export.layout import AUX, LAST, Layout
from hsstream.model_info import layer_outputs
from hsstream.schema import TensorSpec


class Cache(Layout):
    """A cache that its program compares with its config: the model's name, layers and width."""

    norm = "post"
    many = True
    program = ""

    def check(self) -> None:
        """Both kinds of states, of one width, and the facts that the manifest needs."""
        super().check()
        self._only(AUX, LAST)
        specs = self._reader.index.info.schema.by_name
        missing = sorted({AUX, LAST} - specs.keys())
        if missing:
            raise SampleError(f"{self.program} needs {', '.join(missing)}, which this data set does not have")
        self._check_states(specs[AUX], specs[LAST])
        if self._model.name is None:
            raise SampleError(
                f"{self.program} compares the name of the model with its config's, and this data set does "
                "not say it: hsstream facts ROOT --set name=MODEL"
            )
        self._check_layers(specs[AUX].layers)

    def _check_states(self, aux: TensorSpec, last: TensorSpec) -> None:
        if aux.trailing[-1:] != last.trailing:
            raise SampleError(f"{self.program} has states of one width: these differ")

    def _check_layers(self, count: int | None) -> None:
        if self._layers is None:
            raise SampleError(
                f"{self.program} compares the captured layers with its config's, and this data set does not "
                "say which they are: hsstream facts ROOT --set aux_layer_ids=1,14,26 "
                "--set layer_id_convention=layer_output_0based"
            )
        if len(self._layers) != count or list(self._layers) != sorted(set(self._layers)):
            raise SampleError(
                f"{self.program} has layers in ascending order, the {count} of this data set are "
                f"{', '.join(map(str, self._layers))}"
            )

    @property
    def _layers(self) -> tuple[int, ...] | None:
        """The captured layers, as outputs of decoder layers counted from 0."""
        ids, convention = self._model.aux_layer_ids, self._model.layer_id_convention
        return None if ids is None or convention is None else layer_outputs(ids, convention)

    @property
    def _width(self) -> int:
        return self._reader.index.info.schema.by_name[LAST].trailing[0]
