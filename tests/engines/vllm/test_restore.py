"""What one engine process saves, another restores, through a real node: equal to the uncached run."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.engines.vllm.engines import Engine, Json, NewEngine, NewNode, difference, prompt
from tiercache.testing.nodes import NodeProcess

SHARED = prompt(1, 600)
PROMPTS = {
    "whole": SHARED,
    "sibling": [*SHARED[:550], 1, 2, 3],
    "shorter": [*SHARED[:300], *[7] * 50],
    "exact multiple of the block": SHARED[:512],
    "continuation": [*SHARED, *prompt(2, 200)],
}
PARTS = {
    "gemma2": {
        "kv128": ["kv", None, 128, 2],
        "kv128_window200": ["kv", 2, 128, 2],
    },
    "llama": {"kv128": ["kv", None, 128, 2]},
    "qwen3next": {
        "kv128": ["kv", None, 128, 4],
        "recurrent": ["recurrent", 1, 0, 4],
        "conv": ["conv", 1, 0, 2],
    },
    "granite": {
        "kv128": ["kv", None, 128, 2],
        "recurrent": ["recurrent", 1, 0, 8],
        "conv": ["conv", 1, 0, 1],
    },
    "deepseekv2": {"latent16": ["kv", None, 16, 1]},
    "kimilinear": {
        "latent128": ["kv", None, 128, 1],
        "recurrent": ["recurrent", 1, 0, 4],
        "conv": ["conv", 1, 0, 4],
    },
}
TOLERANCE = {"llama": 1e-3, "gemma2": 1e-3, "deepseekv2": 1e-3, "granite": 1e-3}
TOLERANCE_BFLOAT16 = 0.1


@dataclass
class Family:
    """A model: what it computes uncached, what it saved, and an engine that may load."""

    name: str
    node: NodeProcess
    uncached: Json
    saved: Json
    objects: dict[str, dict[str, str]]
    engine: Engine
    block: int


@pytest.fixture(scope="module", params=list(PARTS))
def family(
    request: pytest.FixtureRequest, new_engine: NewEngine, new_node: NewNode
) -> Iterator[Family]:
    name = request.param
    node = new_node()
    first = new_engine(name, node.socket)
    uncached = {case: first.generate(ids, salt=f"alone {case}")[0] for case, ids in PROMPTS.items()}
    saved = {case: first.generate(ids)[0] for case, ids in PROMPTS.items()}
    assert first.ask("flush")
    objects = {case: first.ask("objects", ids=ids) for case, ids in PROMPTS.items()}
    first.close()
    engine = new_engine(name, node.socket)
    block = engine.ask("described")["block"]
    yield Family(name, node, uncached, saved, objects, engine, block)
    engine.close()


def test_another_process_restores_it(family: Family) -> None:
    before = family.node.counter("hit_tokens", "host")
    assert family.engine.ask("described")["parts"] == PARTS[family.name]
    for case, ids in PROMPTS.items():
        family.engine.ask("reset_local")
        (loaded,) = family.engine.generate(ids)
        limit = TOLERANCE.get(family.name, TOLERANCE_BFLOAT16)
        assert loaded["tokens"] == family.uncached[case]["tokens"], case
        assert difference(loaded, family.uncached[case]) <= limit, case
        assert loaded["cached"] == (len(ids) - 1) // family.block * family.block, case
    assert family.node.counter("hit_tokens", "host") > before


def test_a_changed_state_changes_the_output(family: Family) -> None:
    """Greedy tokens hardly see a state that is lost; log-probabilities do."""
    for part in family.engine.ask("described")["parts"]:
        family.engine.ask("hook", mode="tamper", part=part)
        family.engine.ask("reset_local")
        (changed,) = family.engine.generate(SHARED)
        family.engine.ask("hook", mode="")
        assert changed["cached"] == 599 // family.block * family.block
        assert difference(changed, family.uncached["whole"]) > 1e-4, part


def test_objects_of_a_shared_prefix_are_equal_whatever_follows(family: Family) -> None:
    whole = family.objects["whole"]
    assert whole
    for case, ids in PROMPTS.items():
        shared = next(
            (n for n, (a, b) in enumerate(zip(ids, SHARED, strict=False)) if a != b), len(ids)
        )
        for name, content in family.objects[case].items():
            if int(name.split()[1]) <= min(shared, 600):
                assert whole.get(name, content) == content, (case, name)
