"""One engine prefills on its node, another decodes on its own: as one engine does it alone."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.engines.vllm.engines import Engine, Json, NewEngine, NewNode, difference, prompt
from tiercache.testing.etcd import EtcdServer, free_port
from tiercache.testing.nodes import NodeProcess, eventually

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)"
)

PROMPTS = {
    "handed over": prompt(51, 600),
    "a multiple of the block": prompt(52, 640),
    "not named": prompt(53, 600),
    "not a node": prompt(54, 600),
    "its node killed": prompt(56, 600),
    "pushed": prompt(57, 700),
}
TOLERANCE_BFLOAT16 = 0.1
BLOCK = 128
CLUSTER: dict[str, str | float] = {
    "name": "handover",
    # What nodes tell one another by themselves comes too late: only what is named is found.
    "summary_s": 60.0,
    "answer_s_max": 5.0,
    "transfer_s_max": 20.0,
    "ttl_s": 10,
}


_pool = ThreadPoolExecutor(1)


@dataclass
class Pair:
    """Two engines on two nodes, and what the first computes alone."""

    prefill: Engine
    decode: Engine
    nodes: dict[str, NodeProcess]
    alone: dict[str, Json]

    def prefilled(self, case: str) -> Json:
        """Prefill; return what the answer hands over."""
        (first,) = self.prefill.generate(PROMPTS[case], tokens=1)
        assert first["tokens"] == self.alone[case]["tokens"][:1], case
        return first["handed"]

    def decoded(self, case: str, handed: Json) -> Json:
        """Decode elsewhere; the answer must be what one engine gives alone."""
        (found,) = self.decode.generate(PROMPTS[case], handed=handed)
        assert found["reason"] == "length", case
        assert found["tokens"] == self.alone[case]["tokens"], case
        assert difference(found, self.alone[case]) <= TOLERANCE_BFLOAT16, case
        return found

    def counted(self, what: str) -> int:
        """Return what the first engine counted: it tells with a step, and takes none while it is idle."""
        self.prefill.generate(prompt(59, 20), tokens=1)
        return int(self.prefill.ask("counts")[what])

    def saved(self, case: str) -> None:
        """Wait until what was prefilled is with its node."""
        assert self.prefill.ask("flush"), case


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    with ExitStack() as closing:
        closing.callback(server.kill)
        server.start()
        yield server


@pytest.fixture(scope="module", params=["qwen3next", "kimilinear"])
def pair(
    request: pytest.FixtureRequest, etcd: EtcdServer, new_engine: NewEngine, new_node: NewNode
) -> Iterator[Pair]:
    model = request.param
    nodes = {}
    for name in ("prefill-1", "decode-1"):
        listen = f"127.0.0.1:{free_port()}"
        table = {**CLUSTER, "name": model, "node": name, "listen": listen, "etcd": (etcd.url,)}
        nodes[name] = new_node(cluster=table)
    assert eventually(lambda: all(node.gauge("peers") == 1 for node in nodes.values()))

    def start(node: str, **connector: float | str) -> Engine:
        patient = {"node": node, "deadline_s": 10.0, "plan_wait_s": 20.0}
        return new_engine(model, nodes[node].socket, connector=patient | connector)

    prefill = start("prefill-1")
    alone = {case: prefill.generate(ids, salt=f"alone {case}")[0] for case, ids in PROMPTS.items()}
    # By default it is 0.2 s: what is tested is that it comes, not how fast a busy machine is.
    decode = start("decode-1", source_wait_s=10.0)
    yield Pair(prefill, decode, nodes, alone)
    prefill.close()
    decode.close()
    for node in nodes.values():
        if node.running:
            node.kill()


@pytest.mark.parametrize("case", ["handed over", "a multiple of the block"])
def test_what_one_engine_prefilled_another_decodes(pair: Pair, case: str) -> None:
    """Without a wait in between: what is handed over need not be saved yet."""
    node = pair.nodes["decode-1"]
    before = node.counter("peer_read_bytes")
    handed = pair.prefilled(case)
    assert handed == {"tiercache_source": "prefill-1"}
    found = pair.decoded(case, handed)
    assert found["cached"] == (len(PROMPTS[case]) - 1) // BLOCK * BLOCK
    assert node.counter("peer_read_bytes") > before
    assert found["handed"] == {"tiercache_source": "decode-1"}, "it has the prefix now, and more"
    counts = pair.decode.ask("counts")
    assert counts["handed_over"] >= 1
    assert counts["handed_over_short"] == 0


@pytest.mark.parametrize(
    ("case", "handed"),
    [
        ("not named", {"do_remote_prefill": False}),
        ("not a node", {"tiercache_source": ["prefill-1"]}),
    ],
)
def test_what_is_not_named_is_computed(pair: Pair, case: str, handed: Json) -> None:
    """It is the name that is followed: nothing else tells the second node in time."""
    before = pair.decode.ask("counts")
    assert pair.prefilled(case) == {"tiercache_source": "prefill-1"}
    pair.saved(case)
    assert pair.decoded(case, handed)["cached"] == 0
    after = pair.decode.ask("counts")
    assert after["handed_over"] == before["handed_over"]
    ignored = after["sources_ignored"] - before["sources_ignored"]
    assert (ignored > 0) == ("tiercache_source" in handed)


def test_a_prompt_goes_over_while_it_is_computed(pair: Pair) -> None:
    """The node that is to go on with it has it before the first engine is done; nobody asks for it."""
    node = pair.nodes["decode-1"]
    before = node.counter("peer_read_bytes")
    ids = PROMPTS["pushed"]
    pushed: Json = {"tiercache_destination": "decode-1"}
    answer = _pool.submit(lambda: pair.prefill.generate(ids, tokens=1200, handed=pushed)[0])
    whole = (len(ids) - 1) // BLOCK * BLOCK
    assert eventually(lambda: node.counter("peer_read_bytes") > before)
    assert not answer.done(), "it goes on here"
    assert answer.result(120.0)["reason"] == "length"
    assert eventually(lambda: pair.counted("pushed") == 1)
    assert pair.decoded("pushed", {})["cached"] == whole, "though no source is named"
    counts = pair.prefill.ask("counts")
    assert (counts["pushed_short"], counts["destinations_ignored"]) == (0, 0)


def test_a_destination_that_is_no_node_is_ignored(pair: Pair) -> None:
    handed = pair.prefill.generate(PROMPTS["handed over"], handed={"tiercache_destination": "a b"})
    assert handed[0]["tokens"] == pair.alone["handed over"]["tokens"]
    handed = pair.prefill.generate(prompt(58, 300), handed={"tiercache_destination": "nobody"})
    assert handed[0]["reason"] == "length"
    assert eventually(lambda: pair.counted("pushed_short") == 1)
    assert pair.prefill.ask("counts")["destinations_ignored"] == 1


def test_a_node_that_was_killed_costs_the_prefill_and_nothing_else(pair: Pair) -> None:
    case = "its node killed"
    before = pair.decode.ask("counts")
    handed = pair.prefilled(case)
    pair.saved(case)
    pair.nodes["prefill-1"].kill()
    assert pair.decoded(case, handed)["cached"] == 0
    after = pair.decode.ask("counts")
    assert after["handed_over_short"] == before["handed_over_short"] + 1
    assert pair.decode.ask("flush")
    pair.decode.ask("reset_local")
    assert pair.decoded(case, handed)["cached"] == 512, "its own node has it now"
