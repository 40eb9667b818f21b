"""Importers: what other programs left on disk, in canonical names and shapes.

In: a directory. Out: a `Source`, which lists files and loads samples. One module a producer; `base` says
what a source is, `detect` tells producers apart by what their files hold, `files` finds files and makes
keys, `torchfile` and `safefile` are the doors to `torch.load` and safetensors.
"""

from __future__ import annotations
