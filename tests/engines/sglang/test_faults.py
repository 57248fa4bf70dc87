"""What goes wrong beside SGLang or with it: it computes instead, in time, and gives nothing wrong out."""

import socket
import threading
import time
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from tests.engines.sglang.children import NewNode
from tests.engines.sglang.prompts import ALL, NOTHING, TOKENS, NewTree, filled
from tests.engines.sglang.shapes import Shape
from tests.engines.sglang.trees import Restored, Tree, tokens_of, wait_until
from tiercache.testing.nodes import NodeProcess


def free_rows(tree: Tree) -> dict[str, int]:
    """Return what is free in each host pool."""
    entries = tree.controller.mem_pool_host.entries
    return {str(entry.name): entry.host_pool.available_size() for entry in entries}


# --- the node


def test_a_node_that_is_away_costs_nothing_but_speed(node: NodeProcess, new_tree: NewTree) -> None:
    tree = filled(new_tree(node, deadline_s=0.5))
    node.kill()
    began = time.monotonic()
    assert tree.restore(1, TOKENS) == NOTHING
    filled(tree, 2)
    assert time.monotonic() - began < 5
    node.start()

    def resumed() -> bool:
        tree.forget()
        filled(tree, 3)
        return tree.restore(3, TOKENS) == ALL

    wait_until(resumed, "attached again")


def test_a_tree_starts_without_a_node_and_finds_it_later(
    node: NodeProcess, new_tree: NewTree
) -> None:
    node.kill()
    tree = new_tree(node)
    assert filled(tree).restore(1, TOKENS) == NOTHING
    node.start()

    def resumed() -> bool:
        tree.forget()
        return filled(tree, 2).restore(2, TOKENS) == ALL

    wait_until(resumed, "attached")


def test_a_frozen_node_costs_a_bounded_time(node: NodeProcess, new_tree: NewTree) -> None:
    """And what was under way when it froze is not believed."""
    tree = new_tree(node, deadline_s=0.5)

    def surely_filled() -> bool:
        return filled(tree).stops(1, TOKENS) == [TOKENS // tree.shape.page]

    wait_until(surely_filled, "saved, although the machine is busy")
    tree.forget()
    node.send(SIGSTOP)
    try:
        began = time.monotonic()
        assert tree.restore(1, TOKENS) == NOTHING
        first = time.monotonic() - began
        began = time.monotonic()
        assert tree.restore(1, TOKENS) == NOTHING
        second = time.monotonic() - began
    finally:
        node.send(SIGCONT)
    assert first < 4, first
    assert second < 1, second

    def resumed() -> bool:
        tree.forget()
        return tree.restore(1, TOKENS) == ALL

    wait_until(resumed, "thawed")


def test_a_frozen_node_does_not_keep_a_tree_from_detaching(
    node: NodeProcess, new_tree: NewTree
) -> None:
    """SGLang waits ten seconds for its threads."""
    tree = filled(new_tree(node, deadline_s=0.5))
    node.send(SIGSTOP)
    try:
        handle = CacheRequestHandle("frozen", 0)
        tree.cache.prefetch_from_storage(
            handle,
            tree.cache.root_node_handle(),
            tokens_of(1, TOKENS),
            None,
            [],
            matched_prefix_tokens=[],
        )
        began = time.monotonic()
        assert tree.cache.detach_storage_backend()[0]
        assert time.monotonic() - began < 8
    finally:
        node.send(SIGCONT)


def test_a_full_node_declines_and_serves_what_it_has(new_node: NewNode, new_tree: NewTree) -> None:
    """Everything in it is in use: nothing waits for room."""
    node = new_node(host={"bytes": "256KiB", "segment_bytes": "256KiB"}, nvme={"path": ""})
    tree = new_tree(node)
    for seed in range(1, 9):
        filled(tree, seed)
    restored = [tree.restore(seed, TOKENS) for seed in range(1, 9)]
    assert all(each.kv and each.state for each in restored)
    assert any(each.from_storage == TOKENS for each in restored)
    assert any(each.from_storage == 0 for each in restored)


def test_a_state_that_is_gone_takes_its_boundary_along(
    node: NodeProcess, new_tree: NewTree
) -> None:
    """KV alone is no hit."""
    tree = new_tree(node)
    tree.compute(1, 16)
    tree.settle()
    filled(tree)
    assert tree.stops(1, TOKENS) == [4, 8]
    save = tree.backend.batch_set_v2
    tree.backend.batch_set_v2 = lambda transfers, extra_info: {
        transfer.name: [False] * len(transfer.keys) for transfer in transfers
    }
    filled(tree, 2)
    tree.backend.batch_set_v2 = save
    assert tree.stops(2, TOKENS) == []
    assert tree.restore(2, TOKENS) == NOTHING


def test_a_node_of_another_version_is_refused_loudly(new_tree: NewTree, tmp_path: Path) -> None:
    """SGLang's attach fails with the reason, and its server would not start."""
    path = tmp_path / "other"

    class Other:
        """Whatever is said, something that is no message of this protocol comes back."""

        socket = path

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall((1).to_bytes(4, "little") + b"\xc0")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(Exception, match=r"refused.*protocol"):
            new_tree(Other())
        answering.join()


def test_a_required_node_must_be_there(node: NodeProcess, new_tree: NewTree) -> None:
    node.kill()
    with pytest.raises(Exception, match="unavailable"):
        new_tree(node, required=True)


@pytest.mark.parametrize(
    ("table", "why"),
    [({"sockte": "s"}, "sockte"), ({"deadline_s": 9}, "8"), ({"states": "fp8"}, "states")],
    ids=["unknown", "too long", "no codec"],
)
def test_wrong_settings_are_refused_by_name(
    node: NodeProcess, new_tree: NewTree, table: dict[str, object], why: str
) -> None:
    with pytest.raises(Exception, match=why):
        new_tree(node, **table)


# --- SGLang


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_prefetch_policies_give_all_or_nothing(
    node: NodeProcess, new_tree: NewTree, policy: str
) -> None:
    """`best_effort` may stop before anything came; a state is never given for another boundary."""
    tree = filled(new_tree(node))
    tree.cache.prefetch_stop_policy = policy
    restored = tree.restore(1, TOKENS)
    assert restored.kv
    assert restored.state
    assert restored.device in ({0, TOKENS} if policy == "best_effort" else {TOKENS})


@pytest.mark.parametrize(
    "shape",
    [
        Shape(order="page_first_direct"),
        Shape(order="page_first_direct", latent=True),
        Shape(order="layer_first", hybrid=False),
        Shape(order="layer_first", hybrid=False, latent=True),
        Shape(page=16),
        Shape(page=1, hybrid=False),
    ],
    ids=str,
)
def test_orders_and_page_sizes(node: NodeProcess, new_tree: NewTree, shape: Shape) -> None:
    tree = new_tree(node, shape)
    restored = filled(tree).restore(1, TOKENS)
    assert restored == Restored(TOKENS, TOKENS, TOKENS, True, True if shape.hybrid else None)


def test_orders_share_nothing(node: NodeProcess, new_tree: NewTree) -> None:
    """Their pages have as many bytes, in another order."""
    filled(new_tree(node))
    direct = new_tree(node, Shape(order="page_first_direct"))
    assert direct.restore(1, TOKENS) == NOTHING


def test_attach_detach_and_clear_at_run_time(node: NodeProcess, new_tree: NewTree) -> None:
    tree = filled(new_tree(node))
    config = tree.rank.extra_config(tree.shape)
    for _ in range(3):
        assert tree.cache.detach_storage_backend()[0]
        assert tree.backend is None
        attached, message = tree.cache.attach_storage_backend(
            "dynamic", config, "tiny", "wait_complete", "write_through"
        )
        assert attached, message
    assert tree.restore(1, TOKENS) == ALL
    assert tree.cache.clear_storage_backend()
    assert node.gauge("objects", "host") == 0
    tree.forget()
    assert tree.restore(1, TOKENS) == NOTHING
    node.kill()
    assert not tree.cache.clear_storage_backend()


def test_an_attach_that_cannot_be_says_why_and_leaves_nothing(
    node: NodeProcess, new_tree: NewTree
) -> None:
    tree = filled(new_tree(node))
    assert tree.cache.detach_storage_backend()[0]
    config = tree.rank.extra_config(tree.shape).replace('"interface_v1": 1', '"interface_v1": 0')
    attached, message = tree.cache.attach_storage_backend(
        "dynamic", config, "tiny", "wait_complete", "write_through"
    )
    assert not attached
    assert "interface_v1" in message


@pytest.mark.parametrize("frozen", [False, True], ids=["answering", "frozen"])
def test_an_aborted_request_gives_its_pages_back(
    node: NodeProcess, new_tree: NewTree, *, frozen: bool
) -> None:
    tree = filled(new_tree(node))
    before = free_rows(tree)
    if frozen:
        node.send(SIGSTOP)
    try:
        for number in range(4):
            handle = CacheRequestHandle(f"aborted-{number}", 0)
            tree.cache.prefetch_from_storage(
                handle,
                tree.cache.root_node_handle(),
                tokens_of(1, TOKENS),
                None,
                [],
                matched_prefix_tokens=[],
            )
            for _ in range(number):
                tree.cache.check_hicache_events()
            tree.cache.release_aborted_request(handle)

        def returned() -> bool:
            tree.cache.check_hicache_events()
            return free_rows(tree) == before and not tree.cache.ongoing_prefetch

        wait_until(returned, f"{free_rows(tree)} of {before}")
    finally:
        if frozen:
            node.send(SIGCONT)
    if not frozen:
        assert tree.restore(1, TOKENS) == ALL
        tree.forget()
        node.wait_until(lambda: node.gauge("leases") == 0)


def test_sglangs_own_injected_failures_and_delays(node: NodeProcess, new_tree: NewTree) -> None:
    """Every call may fail or be late; what is restored is right."""
    with (
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY.override(0.02),
        envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3),
    ):
        tree = new_tree(node)
    assert type(tree.backend).__name__ == "HiCacheStorageFailureInjector"
    restored = []
    for seed in range(1, 25):
        filled(tree, seed)
        restored.append(tree.restore(seed, TOKENS))
        tree.forget()
    assert all(each.kv and each.state for each in restored)
    assert {each.device for each in restored} == {0, TOKENS}


# --- states in fewer bytes


def test_int8_states_are_what_sglang_would_make_of_them(
    node: NodeProcess, new_tree: NewTree
) -> None:
    """The numerics of SGLang's own INT8 checkpoint pool, bit by bit."""
    import torch
    from sglang.srt.mem_cache.mamba_checkpoint_pool import Int8CheckpointStore

    tree = filled(new_tree(node, states="int8"))
    restored = tree.restore(1, TOKENS)
    assert (restored.device, restored.kv, restored.state) == (TOKENS, True, False)
    request = tree.last_request
    cache = tree.requests.mamba_pool.mamba_cache
    slot = request.kv.mamba_pool_idx.unsqueeze(0)
    for layer in range(2):
        there = cache.temporal[layer, slot]
        exact = tree._state_of(1, 2 * layer, TOKENS, there)
        codes, scale = Int8CheckpointStore.quantize(exact)
        assert torch.equal(there, Int8CheckpointStore.dequantize(codes, scale, exact.dtype))
        conv = cache.conv[0][layer, slot]
        assert torch.equal(conv, tree._state_of(1, 2 * layer + 1, TOKENS, conv))
