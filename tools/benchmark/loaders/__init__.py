"""Every loader that takes part; each module's packages are imported when it is used."""

from __future__ import annotations

from importlib import metadata

from benchmark.errors import BenchError
from benchmark.loaders import (
    ceiling,
    deepspec,
    litdata_chunks,
    mds,
    ours,
    safetensors_files,
    specforge,
    webdataset_pth,
)
from benchmark.loaders.base import Loader

_MODULES = (specforge, safetensors_files, webdataset_pth, mds, litdata_chunks, deepspec, ours, ceiling)
LOADERS: dict[str, Loader] = {loader.name: loader for module in _MODULES for loader in module.LOADERS}


def installed(loader: Loader) -> bool:
    """Whether the package a loader needs is there."""
    try:
        return loader.package is None or bool(metadata.version(loader.package))
    except metadata.PackageNotFoundError:
        return False


def chosen(names: str | None) -> list[Loader]:
    """Loaders by comma-separated names; all of them for None."""
    if names is None:
        return list(LOADERS.values())
    unknown = sorted(set(names.split(",")) - set(LOADERS))
    if unknown:
        raise BenchError(f"no such loader: {', '.join(unknown)}; there are {', '.join(LOADERS)}", 2)
    return [LOADERS[name] for name in LOADERS if name in names.split(",")]
