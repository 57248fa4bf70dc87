"""Whose state is whose: equal tokens of other weights, adapters or tenants share nothing."""

import json
import shutil
from pathlib import Path

import pytest
from sglang.srt.lora.lora_registry import LoRARef

from tests.engines.sglang.prompts import ALL, NOTHING, TOKENS, NewTree, filled
from tests.engines.sglang.trees import Tree
from tiercache.testing.nodes import NodeProcess


def test_other_weights_share_nothing(node: NodeProcess, new_tree: NewTree) -> None:
    tree = filled(new_tree(node))
    other = new_tree(node, weights="others")
    assert other.restore(1, TOKENS) == NOTHING
    assert tree.restore(1, TOKENS) == ALL


def test_weights_are_named_by_the_hubs_commit(
    node: NodeProcess, new_tree: NewTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception, match="name them"):
        new_tree(node, weights="")
    snapshot = tmp_path / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(
        "tiercache_sglang.attaching.try_to_load_from_cache",
        lambda name, file, revision: str(snapshot / file),
    )
    assert filled(new_tree(node, weights="")).restore(1, TOKENS) == ALL


def test_salts_and_adapters_share_nothing(node: NodeProcess, new_tree: NewTree) -> None:
    tree = filled(new_tree(node))
    assert tree.prefetch(1, TOKENS, cache_salt="tenant") == 0
    assert tree.prefetch(1, TOKENS, extra_key="adapter") == 0
    assert tree.prefetch(1, TOKENS) == TOKENS


def adapter(folder: Path, values: bytes, alpha: int = 16) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
    (folder / "adapter_model.safetensors").write_bytes(values)
    return folder


def test_an_adapter_is_known_by_its_content(
    node: NodeProcess, new_tree: NewTree, tmp_path: Path
) -> None:
    """SGLang calls one of `--lora-paths` by its name and path: those stay when it is trained anew."""
    path = tmp_path / "adapter"

    def with_adapter(values: bytes, alpha: int = 16) -> Tree:
        if path.exists():
            shutil.rmtree(path)
        adapter(path, values, alpha)
        named = LoRARef(
            lora_id=LoRARef.deterministic_id("tuned", str(path)),
            lora_name="tuned",
            lora_path=str(path),
        )
        return new_tree(node, server={"enable_lora": True, "lora_paths": [named]})

    first = filled(with_adapter(b"first"))
    assert with_adapter(b"second").prefetch(1, TOKENS) == 0
    assert with_adapter(b"first", alpha=32).prefetch(1, TOKENS) == 0
    assert with_adapter(b"first").prefetch(1, TOKENS) == TOKENS
    assert first.prefetch(1, TOKENS) == TOKENS


def test_weights_that_were_updated_are_others(node: NodeProcess, new_tree: NewTree) -> None:
    """SGLang does not tell a backend, but says which version it runs, if the user named one."""
    tree = filled(new_tree(node))
    other = new_tree(
        node, server={"weight_version": "step 2"}
    )  # Of the same process: of both trees.
    assert other.prefetch(1, TOKENS) == 0
    assert filled(other, 3).restore(3, TOKENS) == ALL
    assert tree.prefetch(1, TOKENS) == 0
    assert filled(tree, 2).backend.figures.counts()["other_weights"] > 1
    before = new_tree(node)
    assert before.prefetch(1, TOKENS) == TOKENS
    assert before.prefetch(2, TOKENS) == 0, "what was computed meanwhile was not saved"
    assert before.prefetch(3, TOKENS) == 0
    tree.forget()
    assert tree.restore(1, TOKENS) == ALL
