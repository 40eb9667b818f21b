"""The way back: a data set as the files of another program.

In: a root, a directory and a format. Out: files laid out as that program reads them; values as any reader
of the data set gets them, so exactly what was packed where the codec is lossless. Refused with SampleError:
tensors the format has no place for (naming them) or lacks, a last hidden state on the wrong side of the
final norm, rows that were never stored; with StorageError: a place that cannot be written.

============== ======================================================================================
specforge      `rows_0-2000/data_N.ckpt` for EAGLE-3, DFlash or DSpark, by the tensors there are
modelopt       `KEY.pt`, NVIDIA Model-Optimizer's dumps, with the side of the norm written into each
speculators    `hidden_states/hs_N.safetensors` and the Arrow data set with their masks in `arrow/`
deepspec       `shard-00000.bin`, ..., `samples.idx`, `manifest.json`: DeepSpec's target cache, version 2
nemo-dspark    `shard-000000.safetensors`, ..., `target_weights.safetensors`, `manifest.json`: NeMo AutoModel
safetensors    `KEY.safetensors` with canonical names, metadata and model facts
============== ======================================================================================

N is the number in the key where every key has one (`data_17`), else the place in the data set; `keys.json`
says which samples became which file. Every file appears under its name complete or not at all. A directory
that holds other files is refused; `overwrite` removes an earlier export from it.

NeMo's caches for EAGLE-3 hold probabilities over a draft vocabulary: there is no export to them.
"""

from __future__ import annotations

from hsstream.export.formats import FORMATS
from hsstream.export.run import ExportReport, export

__all__ = ["FORMATS", "ExportReport", "export"]
