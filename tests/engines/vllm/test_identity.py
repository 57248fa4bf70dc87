"""Equal tokens meet only where they mean the same state."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.engines import Engine, Json, NewEngine, NewNode, difference, prompt
from tiercache.testing.nodes import NodeProcess

IDS = prompt(9, 400)


@pytest.fixture(scope="module")
def node(new_node: NewNode) -> NodeProcess:
    return new_node()


@pytest.fixture(scope="module")
def engine(new_engine: NewEngine, node: NodeProcess) -> Iterator[Engine]:
    engine = new_engine(
        "llama",
        node.socket,
        settings={"enable_lora": True, "max_lora_rank": 8, "max_loras": 4},
        transfer={"kv_connector_module_path": None},
        by_name=True,
    )
    yield engine
    engine.close()


def cached(engine: Engine, **more: Json) -> int:
    """Return how much of the prompt comes from the node."""
    engine.ask("reset_local")
    (found,) = engine.generate(IDS, **more)
    engine.ask("flush")
    return int(found["cached"])


def test_tenants_share_nothing(engine: Engine) -> None:
    assert [cached(engine, salt=salt) for salt in ("a", "b", "a", "b")] == [0, 0, 384, 384]
    assert cached(engine) == 0


def test_other_weights_share_nothing(
    engine: Engine, node: NodeProcess, new_engine: NewEngine
) -> None:
    cached(engine)
    assert cached(engine) == 384
    other = new_engine("llama", node.socket, seed=1)
    assert cached(other) == 0
    assert cached(other) == 384
    other.close()


def test_an_adapter_is_its_content(engine: Engine, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_adapter(first, 1)
    write_adapter(second, 2)
    cached(engine)
    assert cached(engine, lora=["first", 1, str(first)]) == 0
    assert cached(engine, lora=["first", 1, str(first)]) == 384
    assert cached(engine, lora=["second", 2, str(second)]) == 0
    copy = tmp_path / "copy"
    write_adapter(copy, 1)
    assert cached(engine, lora=["first", 3, str(copy)]) == 384, "the same name and content"
    other = tmp_path / "other"
    write_adapter(other, 5)
    assert cached(engine, lora=["first", 4, str(other)]) == 0, "the same name, other content"
    assert cached(engine) == 384


def test_an_adapter_that_changed_on_disk_is_not_cached(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "changing"
    write_adapter(folder, 6)
    lora = ["changing", 6, str(folder)]
    assert [cached(engine, lora=lora), cached(engine, lora=lora)] == [0, 384]
    write_adapter(folder, 7)
    assert [cached(engine, lora=lora), cached(engine, lora=lora)] == [0, 0]


def test_a_chat_of_five_turns(engine: Engine) -> None:
    """Each turn resumes where the last one's prompt ended, or deeper."""
    history = prompt(20, 150)
    before = 0
    for turn in range(5):
        engine.ask("reset_local")
        (found,) = engine.generate(history, tokens=40)
        (plain,) = engine.generate(history, tokens=40, salt=f"plain {turn}")
        assert found["tokens"] == plain["tokens"]
        assert difference(found, plain) < 1e-3
        assert found["cached"] >= before // 128 * 128
        engine.ask("flush")
        before = len(history)
        history = [*history, *found["tokens"], *prompt(21 + turn, 90)]
    assert before > 500


def test_a_reset_really_clears(engine: Engine) -> None:
    cached(engine)
    assert cached(engine) == 384
    assert engine.ask("reset_local", connector=True)
    (found,) = engine.generate(IDS)
    assert found["cached"] == 0
    engine.ask("flush")
    assert cached(engine) == 384


def write_adapter(folder: Path, seed: int) -> None:
    """Write a LoRA adapter of the tiny Llama."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for name, out in (("q_proj", 128), ("v_proj", 64)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{base}.lora_A.weight"] = torch.randn(8, 128) * 0.3
            tensors[f"{base}.lora_B.weight"] = torch.randn(out, 8) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
