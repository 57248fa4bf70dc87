"""A vLLM that is not understood is refused; one that is, is known by its sources."""

import importlib
import json
from pathlib import Path

import pytest

from tiercache.errors import ConfigError
from tiercache_vllm import gate
from tiercache_vllm.gate import LATER, NEEDED, OVERRIDDEN, faults_in, refuse_unknown
from tiercache_vllm.signatures import Found, found_in

RELEASES = Path(__file__).parents[1] / "data" / "vllm"
SOURCE = """
class Base(ABC):
    field: int
    other = 3

    def __init__(self, config, *, role=None):
        self.made = config

    @property
    def shown(self): ...

    @abstractmethod
    def load(self, request, *rest, **more): ...

def make(name): ...
"""


def test_signatures_are_read_without_running_anything() -> None:
    found = found_in(SOURCE)
    assert found.signatures["Base"] == [
        "__init__", "field", "load", "made", "other", "shown",
    ]  # fmt: skip
    assert found.signatures["Base.__init__"] == ["self", "config", "role"]
    assert found.signatures["Base.load"] == ["self", "request", "*rest", "**more"]
    assert found.signatures["make"] == ["name"]
    assert found.abstract == {"Base": ["load"]}


def releases() -> list[Path]:
    return sorted(RELEASES.glob("*.json"))


def told(path: Path) -> dict[str, Found]:
    modules = json.loads(path.read_text())["modules"]
    return {name: Found(one["signatures"], one["abstract"]) for name, one in modules.items()}


def test_there_are_releases_to_compare_with() -> None:
    assert [path.stem for path in releases()] == ["0.32.0", "0.33.0"]


@pytest.mark.parametrize("path", releases(), ids=lambda path: path.stem)
def test_the_connectors_fit_the_release(path: Path) -> None:
    assert faults_in(told(path)) == []


@pytest.mark.parametrize("path", releases(), ids=lambda path: path.stem)
def test_every_single_need_is_checked(path: Path) -> None:
    """Whatever is taken away from a release, or changed, is missed."""
    for module, names in NEEDED.items():
        found = told(path)
        del found[module]
        assert faults_in(found), module
        for name, wanted in names.items():
            found = told(path)
            found[module].signatures.pop(name)
            assert f"{module}.{name} is gone" in faults_in(found)
            found = told(path)
            have = list(found[module].signatures[name])
            if wanted:
                have.remove(wanted[-1])
                found[module].signatures[name] = have
                assert any(f"{module}.{name}" in fault for fault in faults_in(found))


@pytest.mark.parametrize("module", OVERRIDDEN)
def test_a_new_parameter_or_a_new_duty_is_a_fault(module: str) -> None:
    base, methods = OVERRIDDEN[module]
    found = told(releases()[-1])
    name = next(name for name in methods if name != "__init__")
    found[module].signatures[f"{base}.{name}"] = [*methods[name], "surprise"]
    assert any("surprise" in fault for fault in faults_in(found))
    found = told(releases()[-1])
    found[module].abstract[base] = [*found[module].abstract[base], "novelty"]
    assert f"{module}.{base} wants novelty" in faults_in(found)


def test_hooks_that_came_later_are_as_they_are_implemented_or_not_there() -> None:
    first, last = (told(path) for path in releases())
    for module, names in LATER.items():
        assert not names.keys() & first[module].signatures.keys()
        assert names.keys() <= last[module].signatures.keys()
        for name, wanted in names.items():
            changed = told(releases()[-1])
            changed[module].signatures[name] = [*wanted, "surprise"]
            assert f"{module}.{name} takes {', '.join(wanted)}, surprise" in faults_in(changed)


def test_without_vllm_it_says_so_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="vLLM of unknown version is not one that") as caught:
        refuse_unknown()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", ["connector", "ec_connector"])
def test_the_gate_stands_before_anything_of_vllm_is_imported(module: str) -> None:
    with pytest.raises(ConfigError, match="is not one that tiercache's connector understands"):
        importlib.import_module(f"tiercache_vllm.{module}")


def test_an_installed_vllm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_installed", lambda: told(releases()[0]))
    refuse_unknown()
