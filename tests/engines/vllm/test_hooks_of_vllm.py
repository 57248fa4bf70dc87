"""What vLLM shows of the connector: metrics, sources of hits, events, and other connectors beside it."""

from collections.abc import Iterator

import pytest

from tests.engines.vllm.engines import Engine, Json, NewEngine, NewNode, prompt
from tiercache.testing.nodes import NodeProcess, eventually

IDS = prompt(31, 500)


@pytest.fixture(scope="module")
def node(new_node: NewNode) -> NodeProcess:
    return new_node(nvme={"cap_bytes": "64MiB", "segment_bytes": "4MiB", "write_back": "eager"})


@pytest.fixture(scope="module")
def engine(new_engine: NewEngine, node: NodeProcess) -> Iterator[Engine]:
    """Loaded through MultiConnector, with another connector in the first place."""
    ours = {
        "kv_connector": "TierCacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "socket": str(node.socket),
            "retry_s": 0.05,
            "naming_wait_s": 60.0,
        },
    }
    theirs = {"kv_connector": "SilentConnector", "kv_role": "kv_both"} | {
        "kv_connector_module_path": "tests.engines.vllm.silent"
    }
    engine = new_engine(
        "qwen3next",
        node.socket,
        transfer={
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": None,
            "kv_connector_extra_config": {"connectors": [theirs, ours]},
        },
        settings={"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}},
    )
    yield engine
    engine.close()


def counted(engine: Engine) -> Json:
    """Return what the connector counted."""
    return engine.ask("counts")


def test_host_hits_then_disk_hits(engine: Engine, node: NodeProcess) -> None:
    (first,) = engine.generate(IDS)
    assert engine.ask("flush", durable=True)
    engine.ask("reset_local")
    (second,) = engine.generate(IDS)
    assert (first["cached"], second["cached"]) == (0, 384)
    assert first["tokens"] == second["tokens"]
    node.kill()
    node.start()
    node.wait_scanned()

    def again() -> bool:
        engine.ask("reset_local")
        (third,) = engine.generate(IDS)
        assert third["tokens"] == first["tokens"]
        return bool(third["cached"] == 384)

    assert eventually(again)
    metrics = engine.ask("metrics")
    sources = {
        source: sum(
            value
            for name, value in metrics.items()
            if "prompt_tokens_cached_by_source" in name and f"'{source}'" in name
        )
        for source in ("host", "disk")
    }
    assert sources == {"host": 384, "disk": 384}
    counts = counted(engine)
    assert counts["host_tokens"] == 384
    assert counts["nvme_tokens"] == 384
    assert counts["attached"] == 1
    assert counts["loads"] == 2
    assert counts["loads_failed"] == 0
    assert counts["saved_objects"] >= 5
    assert eventually(lambda: node.gauge("leases") == 0), "everything was let go"
    assert node.counter("protocol_errors") == 0


def test_events_name_blocks_that_can_be_had(engine: Engine) -> None:
    engine.ask("generate", prompts=[{"ids": prompt(32, 300)}])
    events = engine.ask("events_of_steps")
    mediums = {event["medium"] for event in events if event["kind"] == "BlockStored"}
    assert "CPU" in mediums
    ours = [event for event in events if event.get("ownership") == "tiercache"]
    assert {event["groups"] for event in ours} == {0, 1}
    assert all(event["hashes"] for event in ours)
