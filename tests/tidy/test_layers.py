"""Who may import whom. The table is the architecture; everything else follows from it."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PURE = {"errors", "state"}
JOINING = PURE | {
    "wire",
    "core",
    "tiers",
    "transport",
    "registry",
    "budget",
    "config",
    "tables",
    "settings",
    "client",
    "models",
}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "state": {"errors"},
    # Four siblings: each can be read, tested and replaced without the others.
    "wire": PURE,
    "core": PURE,
    "tiers": PURE,
    "transport": PURE,
    # What nodes agree on, beside them: no bytes, and no decisions of a cache.
    "registry": {"errors"},
    # Settings know nothing of what they set.
    "budget": {"errors", "config"},  # `config` for a type only; checked below.
    "tables": {"errors"},
    "settings": set(),
    "config": {"errors", "budget", "tables", "settings"},
    # Where the siblings meet.
    "models": PURE | {"core"},
    # Many requests, no bytes: the policies of the core by themselves.
    "replay": PURE | {"core", "models"},
    "client": PURE | {"wire"},
    # In the engine's process, with PyTorch: the node knows nothing of it.
    "device": PURE | {"client"},
    "runtime": JOINING - {"client"},
    "testing": JOINING | {"device", "runtime", "testing"},
    "cli": JOINING | {"replay", "device", "runtime", "testing"},
    "__init__": PURE,
    "__main__": {"cli"},
}

ADAPTERS_MAY_IMPORT = PURE | {"client", "device", "testing"}
MAY_IMPORT_ADAPTERS = ("adapters/", "tiercache/cli/")
MAY_IMPORT_KERNELS = ("adapters/", "kernels/", "tiercache/device/")
KERNELS_MAY_IMPORT = {"numba", "numpy", "torch", "triton", "tiercache_kernels"}
"""And the standard library: a leaf, which knows nothing of ours."""

STDLIB_ONLY_WITH = {"state": {"msgspec"}, "core": {"msgspec"}, "wire": {"msgspec"}}

IMPURE = {
    "asyncio", "concurrent", "datetime", "multiprocessing", "os", "pathlib", "random", "secrets",
    "selectors", "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time",
    "uuid",
}  # fmt: skip
"""What the core, the wire and the vocabulary must not reach: clocks, dice, files, other threads."""

ENGINES = {"torch", "triton", "numba", "tiercache_kernels", "sglang", "vllm", "transformers"}
HEAVY = (*sorted(ENGINES), "rocksdict", "aiohttp", "zmq")


def imports(tree: ast.Module, path: str) -> Iterator[tuple[str, bool]]:
    """Yield each imported module's full name, and whether it is for types only."""
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for name in names:
                    yield name.name, id(node) in for_types
            case ast.ImportFrom(module=module, level=level, names=names):
                assert level == 0, f"{path}:{node.lineno}: import by the full name"
                for name in names:
                    yield f"{module}.{name.name}", id(node) in for_types


def layer_of(path: str) -> str:
    """tiercache/core/machine.py -> core; tiercache/errors.py -> errors."""
    return Path(path).parts[1].removesuffix(".py")


def test_every_layer_is_in_the_table(trees: Mapping[str, ast.Module]) -> None:
    layers = {layer_of(path) for path in trees if path.startswith("tiercache/")}
    assert layers <= MAY_IMPORT.keys()


def test_layers_import_only_what_they_may(trees: Mapping[str, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        if path.startswith("tiercache/"):
            layer = layer_of(path)
            allowed = MAY_IMPORT[layer] | {layer, "", "__version__"}
        elif path.startswith("adapters/"):
            allowed = ADAPTERS_MAY_IMPORT | {"__version__"}
        else:
            continue
        for name, _ in imports(tree, path):
            package, _, rest = name.partition(".")
            ours = package == "tiercache" and rest.split(".")[0] not in allowed
            glue = package.startswith("tiercache_") and not path.startswith(
                MAY_IMPORT_KERNELS if package == "tiercache_kernels" else MAY_IMPORT_ADAPTERS
            )
            if ours or glue:
                wrong.append(f"{path} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_kernels_are_a_leaf(trees: Mapping[str, ast.Module]) -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees.items()
        if path.startswith("kernels/")
        for name, _ in imports(tree, path)
        if name.split(".")[0] not in KERNELS_MAY_IMPORT | sys.stdlib_module_names
    ]
    assert not wrong, "\n".join(wrong)


def test_the_budget_sees_settings_only_as_a_type(trees: Mapping[str, ast.Module]) -> None:
    found = [typed for name, typed in imports(trees["tiercache/budget.py"], "") if "config" in name]
    assert found
    assert all(found)


def test_inner_layers_need_little(trees: Mapping[str, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        layer = layer_of(path) if path.startswith("tiercache/") else ""
        if layer not in STDLIB_ONLY_WITH:
            continue
        for name, _ in imports(tree, path):
            package = name.split(".")[0]
            if package == "tiercache" or package in STDLIB_ONLY_WITH[layer]:
                continue
            if package not in sys.stdlib_module_names:
                wrong.append(f"{path} imports {name}: not in the standard library")
            if layer in {"core", "state", "wire"} and package in IMPURE:
                wrong.append(f"{path} imports {name}: time, chance and files are arguments")
    assert not wrong, "\n".join(wrong)


def test_the_core_never_awaits(trees: Mapping[str, ast.Module]) -> None:
    waiting = ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith
    wrong = [
        f"{path}:{node.lineno}"
        for path, tree in trees.items()
        if path.startswith(("tiercache/core/", "tiercache/state/", "tiercache/wire/"))
        for node in ast.walk(tree)
        if isinstance(node, waiting)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "module", ["tiercache", "tiercache.client", "tiercache.config", "tiercache.cli"]
)
def test_importing_loads_nothing_heavy(module: str, root: Path) -> None:
    code = f"import sys, {module}; print(sorted(set(sys.modules) & set({HEAVY!r})))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def test_the_sidecar_never_loads_an_engine(trees: Mapping[str, ast.Module]) -> None:
    wrong = [
        f"{path} imports {name}"
        for path, tree in trees.items()
        if path.startswith("tiercache/") and layer_of(path) not in {"cli", "device", "testing"}
        for name, _ in imports(tree, path)
        if name.split(".")[0] in ENGINES
    ]
    assert not wrong, "\n".join(wrong)
