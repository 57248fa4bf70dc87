"""What is shipped, under which names, and what the environment holds."""

import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import cast

import tiercache

PACKAGES = {
    "tiercache",
    "tiercache_kernels",
    "tiercache_sglang",
    "tiercache_transformers",
    "tiercache_vllm",
}
SOURCE_ROOTS = ("adapters", "kernels", "ops", "tests")


def project(root: Path) -> dict[str, object]:
    with (root / "pyproject.toml").open("rb") as file:
        return cast("dict[str, object]", tomllib.load(file)["project"])


def pins(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that the environment pins, by canonical name."""
    found = {}
    for line in texts["requirements-dev.txt"].splitlines():
        if line and not line.startswith("#"):
            name, exactly, version = line.partition("==")
            assert exactly, f"{line!r} is not pinned"
            found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return found


def test_source_roots_are_not_packages(root: Path) -> None:
    """Another project's `kernels`, `adapters` and `ops` exist; ours must never answer for them."""
    folders = [root / name for name in SOURCE_ROOTS]
    folders += [folder for folder in (root / "adapters").iterdir() if folder.is_dir()]
    folders += [folder for folder in (root / "tests").rglob("*") if folder.is_dir()]
    assert [folder for folder in folders if (folder / "__init__.py").exists()] == []


def test_the_wheel_holds_our_packages_and_nothing_else(root: Path, tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    result = subprocess.run(build, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name]


def test_it_can_never_be_uploaded_by_mistake(root: Path) -> None:
    assert "Private :: Do Not Upload" in cast("list[str]", project(root)["classifiers"])


def test_one_version(root: Path, texts: Mapping[str, str]) -> None:
    assert project(root)["version"] == tiercache.__version__
    assert f"## {tiercache.__version__}" in texts["CHANGELOG.md"]


NOT_IN_THE_ENVIRONMENT = {"plot", "sglang", "ucx", "vllm"}
"""Extras whose tests skip without them (ucx: 364 MB of libraries for GPUs and fabrics), or have an
environment of their own (sglang, vllm: `tests/engines`)."""


def test_the_environment_pins_what_the_project_asks_for(
    root: Path, texts: Mapping[str, str]
) -> None:
    pinned = pins(texts)
    assert pinned["torch"] == "2.13.0"
    asked = [*cast("list[str]", project(root)["dependencies"])]
    extras = cast("dict[str, list[str]]", project(root)["optional-dependencies"])
    for extra in extras.keys() - NOT_IN_THE_ENVIRONMENT:
        asked += extras[extra]
    for requirement in asked:
        name = re.split(r"[<>=!~ ]", requirement)[0]
        assert re.sub(r"[-_.]+", "-", name).lower() in pinned
        exact = re.search(r"==(.+)", requirement)
        assert not exact or pinned[name] == exact[1]


def test_the_build_needs_no_network(root: Path, texts: Mapping[str, str]) -> None:
    with (root / "pyproject.toml").open("rb") as file:
        build = tomllib.load(file)["build-system"]
    assert build["requires"] == [f"hatchling=={pins(texts)['hatchling']}"]


def test_kernels_that_replace_those_of_the_models_are_absent(texts: Mapping[str, str]) -> None:
    """With fla-core installed, Transformers would run other kernels than the reference."""
    installed = {str(found.name).lower() for found in metadata.distributions()}
    assert not {"fla-core", "flash-linear-attention", "causal-conv1d"} & installed
    for path in ("requirements-dev.txt", "pyproject.toml"):
        assert "fla-core" not in texts[path]
