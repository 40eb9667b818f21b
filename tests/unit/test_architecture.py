"""Rooms, layers and doors of DESIGN.md, as the code stands.

A room is a module or package directly below `hsstream`; it imports rooms of lower layers only. A
third-party library has a door, the modules that may import it; numpy and torch have none.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "hsstream"

#: From the bottom up. Rooms of one layer do not know each other.
LAYERS = (
    {"decoders", "errors", "version", "memory", "ordered", "processes", "shared_numbers", "stats"},
    {"model_info"},
    {"blocks", "codecs", "delivery", "plan", "ranks", "sample", "storage"},
    {"position", "presets", "quantized", "selection", "simulate", "sources", "teacher", "weights"},
    {"norm", "schema"},
    {"header"},
    {"runs", "table"},
    {"encoding", "batch"},
    {"decoding", "facts", "token_shard"},
    {"fetch", "shard", "space"},
    {"appender", "index"},
    {"handover", "lifetime", "manifest", "stream"},
    {"catalog", "reader", "verify", "writer"},
    {"supervision"},
    {"dataset", "estimate", "export", "packing", "recode", "stock"},
    {"vocab"},
    {"trainers"},
    {"audit"},
    {"cli"},
    {"__main__"},
)

#: library -> the modules that may import it; a trailing slash means a whole package.
DOORS = {
    "lz4": ("blocks",),
    "zstandard": ("blocks",),
    "xxhash": ("blocks",),
    "msgpack": ("header",),
    "tarfile": ("shard",),
    "fsspec": ("storage/",),
    "botocore": ("storage/",),
    "numba": ("codecs/",),
    "llvmlite": ("codecs/jit",),
    "pickle": ("sources/torchfile",),
    "safetensors": ("sources/", "weights"),
    "datasets": ("sources/",),
    "matplotlib": ("cli/picture", "cli/estimate_plot"),
    "transformers": ("estimate/model",),
    "numpy": ("",),
    "torch": ("",),
}
#: Rooms that work without torch.
PURE = {"plan", "selection", "storage", "blocks", "errors", "stats", "simulate", "version"}

DYNAMIC = {"importlib.import_module", "import_module", "__import__"}
LONGEST_FUNCTION, LONGEST_FILE = 60, 400


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package by its path below it, without `.py`."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(tree: ast.AST, by_name: bool = True) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of imports, wherever they stand; by_name: `import_module("...")` too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from ((submodule(origin, alias.name), node.lineno) for alias in node.names)
        elif by_name and isinstance(node, ast.Call) and ast.unparse(node.func) in DYNAMIC:
            yield from ((arg.value, node.lineno) for arg in node.args if isinstance(arg, ast.Constant))
        yield from imports(node, by_name)


def submodule(origin: str, name: str) -> str:
    """What `from origin import name` imports: the module of that name, if there is one, else origin."""
    below = inside(f"{origin}.{name}")
    return f"{origin}.{name}" if origin.startswith("hsstream.") and below in modules() else origin


def room_of(path: str) -> str:
    return path.split("/")[0]


def inside(name: str) -> str:
    """`hsstream.codecs.base` -> `codecs/base`."""
    return name.removeprefix("hsstream").removeprefix(".").replace(".", "/")


def depth(room: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if room in layer)


def test_every_room_has_one_place() -> None:
    placed = [room for layer in LAYERS for room in sorted(layer)]
    assert len(placed) == len(set(placed))
    assert {room_of(path) for path in modules()} - {"__init__"} == set(placed)


def test_imports_point_down() -> None:
    wrong = [
        f"{path}.py:{line} imports {name}"
        for path, tree in modules().items()
        for name, line in imports(tree)
        if path != "__init__" and name.startswith("hsstream.") and room_of(path) != room_of(inside(name))
        if depth(room_of(inside(name))) >= depth(room_of(path))
    ]
    assert wrong == []


def test_nobody_inside_imports_from_the_package_root_or_relatively() -> None:
    wrong = [
        f"{path}.py:{line}"
        for path, tree in modules().items()
        for name, line in imports(tree)
        if name == "hsstream" or name.startswith(".")
    ]
    assert wrong == []


def test_there_are_no_import_cycles() -> None:
    """`codecs/backend` alone loads a module by name (the kernels, which need numba) that imports it."""
    graph = {path.removesuffix("/__init__"): set[str]() for path in modules()}
    for path, tree in modules().items():
        here = path.removesuffix("/__init__")
        targets = {inside(name) for name, _ in imports(tree, by_name=False) if name.startswith("hsstream.")}
        graph[here] |= (targets & graph.keys()) - {here}
    while graph:
        free = {module for module, targets in graph.items() if not targets}
        assert free, f"a cycle among {sorted(graph)}"
        graph = {module: targets - free for module, targets in graph.items() if module not in free}


def test_each_library_has_one_door() -> None:
    standard, wrong = sys.stdlib_module_names - DOORS.keys(), []
    for path, tree in modules().items():
        for name, line in imports(tree):
            library = name.split(".")[0]
            if library == "hsstream" or library in standard:
                continue
            door = DOORS.get(library, ())
            if not any(
                path == way or (way.endswith("/") and path.startswith(way)) or way == "" for way in door
            ):
                wrong.append(f"{path}.py:{line} imports {library}")
    assert wrong == []


@pytest.mark.parametrize("library", sorted(DOORS))
def test_every_door_is_used_or_gone(library: str) -> None:
    assert any(name.split(".")[0] == library for tree in modules().values() for name, _ in imports(tree))


def test_pure_rooms_do_without_torch() -> None:
    wrong = [
        f"{path}.py:{line}"
        for path, tree in modules().items()
        for name, line in imports(tree)
        if room_of(path) in PURE and name.split(".")[0] == "torch"
    ]
    assert wrong == []


def functions() -> Iterator[tuple[str, int]]:
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path}.py {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_and_files_are_short() -> None:
    assert [found for found in functions() if found[1] > LONGEST_FUNCTION] == []
    lengths = {path: len((PACKAGE / f"{path}.py").read_text().splitlines()) for path in modules()}
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


def test_nine_functions_in_ten_have_at_most_30_lines() -> None:
    lengths = sorted(length for _, length in functions())
    assert lengths[len(lengths) * 9 // 10] <= 30
    assert lengths[len(lengths) // 2] <= 9


def test_nothing_prints_asserts_or_catches_everything() -> None:
    wrong = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            prints = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
            if bare or prints or isinstance(node, ast.Assert):
                wrong.append(f"{path}.py:{node.lineno}")  # type: ignore[attr-defined]
    assert wrong == []


def test_every_module_says_what_comes_in_goes_out_and_is_refused() -> None:
    assert [path for path, tree in modules().items() if not ast.get_docstring(tree)] == []
    assert not (PACKAGE / "utils.py").exists()
