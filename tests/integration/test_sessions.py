"""Clients that die or freeze, and a node that does: who gets what back, and when."""

import select
import signal
import threading
import time

import pytest

from tiercache.testing import toy
from tiercache.testing.children import READY, children
from tiercache.testing.nodes import NewClient, NewNode, NodeProcess, eventually
from tiercache.testing.speaker import Speaker
from tiercache.wire import messages as wire

BACK_S = 2.0
"""What a dead client held is free within this time."""

HOLDS = """
client = Client.attach(path, toy.NAMESPACE, toy.LAYOUT, options=options)
chain = toy.chain(0)
plans = [client.plan(f"{number}-{n}", chain, limit=toy.TOKENS) for n in range(100)]
assert all(plan.boundary for plan in plans), plans
"""
RESERVES = """
chain = toy.chain(number)
speaker = Speaker(path)
speaker.attach(toy.NAMESPACE, toy.LAYOUT)
part = toy.KV
offers = [
    wire.Offer(0, 0, 1, "native", chain.digest_at(16 * n), b"", 16 * n - 16, 16 * n,
               part.nbytes(16, part.whole))
    for n in (1, 2)
]
reply = speaker.ask(wire.Reserve(speaker.call(), "r", "", "", offers))
assert [grant.outcome for grant in reply.grants] == ["granted"] * 2, reply
"""
KEEPS = """
client = Client.attach(path, toy.NAMESPACE, toy.LAYOUT, options=options)
chain = toy.chain(number)
plan = client.plan("keep", chain, limit=toy.TOKENS)
assert plan.boundary == toy.TOKENS, plan
blobs = plan.blobs
print("ready", flush=True)
assert sys.stdin.readline() == "look\\n"
print("intact" if not list(toy.wrong(plan, chain)) else "other bytes", flush=True)
"""


# --- clients that die


@pytest.mark.parametrize(("script", "name"), [(HOLDS, "leases"), (RESERVES, "reservations")])
def test_what_a_killed_client_held_is_free_in_time(
    new_client: NewClient, node: NodeProcess, script: str, name: str
) -> None:
    client = new_client(node)
    toy.put(client, 0)
    with children(node.socket, script + READY, 3) as held:
        assert node.gauge(name) > 0
        free = node.gauge("bytes", "host")
        for child in held:
            child.kill()
        assert eventually(lambda: node.gauge(name) == 0, BACK_S)
        assert eventually(lambda: node.gauge("sessions") == 1, BACK_S)
        assert node.gauge("quarantined_bytes") == 0
        assert node.gauge("bytes", "host") <= free
    assert toy.resumed(client, 0) == 40, "others are not affected"


def test_memory_stays_while_a_disconnected_process_may_still_write(node: NodeProcess) -> None:
    script = RESERVES + "speaker.sock.close()\n" + READY
    with children(node.socket, script) as (child,):
        assert eventually(lambda: node.gauge("sessions") == 0)
        assert node.gauge("bytes", "host") > 0, "it is alive, and has the arena mapped"
        child.kill()
        assert eventually(lambda: node.gauge("bytes", "host") == 0, BACK_S)


def test_who_says_that_it_is_done_is_believed_at_once(node: NodeProcess) -> None:
    script = RESERVES + "speaker.tell(wire.Detach())\n" + READY
    with children(node.socket, script):
        assert eventually(lambda: node.gauge("bytes", "host") == 0, BACK_S)


def test_a_client_that_dies_with_answers_unread_is_noticed(node: NodeProcess) -> None:
    """The kernel then tells the node of an error together with what was said last."""
    speaker = Speaker(node.socket)
    speaker.attach(toy.NAMESPACE, toy.LAYOUT)
    speaker.tell(wire.Stats(speaker.call()))
    assert select.select([speaker.sock], [], [], 20)[0], "it was answered"
    node.send(signal.SIGSTOP)
    speaker.tell(wire.Stats(speaker.call()))
    speaker.close()
    node.send(signal.SIGCONT)
    assert eventually(lambda: node.gauge("sessions") == 0, BACK_S)
    assert eventually(lambda: node.gauge("open_connections") == 1, BACK_S), "who asks, and no other"


def test_dead_clients_leave_no_descriptors(new_client: NewClient, new_node: NewNode) -> None:
    node = new_node(nvme={"path": ""})
    node.start()
    client = new_client(node)
    toy.put(client, 0)
    before = node.open_files()
    with children(node.socket, HOLDS + READY, 3) as held:
        assert node.open_files() > before
        for child in held:
            child.kill()
        assert eventually(lambda: node.open_files() <= before, BACK_S)


# --- clients that freeze


def test_bytes_under_a_frozen_reader_are_not_reused(
    new_client: NewClient, new_node: NewNode
) -> None:
    """It holds its lease for longer than any lease lasts, while others want the memory."""
    node = new_node(
        host={"bytes": "512KiB", "segment_bytes": "512KiB"},
        limits={"lease_s_max": 0.2},
        nvme={"path": ""},
    )
    node.start()
    client = new_client(node)
    toy.put(client, 1)
    with children(node.socket, KEEPS) as (child,):
        child.process.send_signal(signal.SIGSTOP)
        for number in range(2, 60):
            chain = toy.chain(number, 40)
            client.save(f"put-{number}", chain, toy.state(chain, 40))
        assert eventually(lambda: node.gauge("leases_overdue") > 0, BACK_S)
        for number in range(60, 120):
            chain = toy.chain(number, 40)
            client.save(f"put-{number}", chain, toy.state(chain, 40))
        assert node.counter("evictions", "host") > 100
        child.process.send_signal(signal.SIGCONT)
        child.tell("look")
        child.reads("intact")


# --- a node that freezes, or is started again


def test_calls_to_a_frozen_node_end_at_their_deadline_and_then_work_again(
    new_client: NewClient,
    node: NodeProcess,
) -> None:
    deadline_s = 0.3
    client = new_client(node, deadline_s=deadline_s)
    toy.put(client, 1)
    assert toy.resumed(client, 1) == 40
    node.send(signal.SIGSTOP)
    chain = toy.chain(1, 40)
    for number in range(3):
        began = time.monotonic()
        plan = client.plan(f"frozen-{number}", chain)
        assert time.monotonic() - began < deadline_s + 0.3
        assert plan.boundary == 0
        assert plan.reason
        saved = client.save(f"frozen-{number}", chain, toy.state(chain, 40))
        assert saved.stored == 0
        assert time.monotonic() - began < 2 * deadline_s + 0.5
    node.send(signal.SIGCONT)
    assert eventually(lambda: toy.resumed(client, 1) == 40)
    assert eventually(lambda: node.gauge("leases") == 0, BACK_S), "late answers are let go"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("down_s", [0.0, 0.05])
def test_a_restart_is_noticed_by_the_boot_token(
    new_client: NewClient, new_node: NewNode, number: signal.Signals, down_s: float
) -> None:
    node = new_node(nvme={"path": ""})
    node.start()
    client = new_client(node)
    toy.put(client, 1)
    plan = client.plan("before", toy.chain(1, 40), limit=40)
    assert plan.boundary == 40
    boot = client.boot
    node.send(number)
    node.wait()
    threading.Event().wait(down_s)
    node.start()
    assert toy.resumed(client, 1) == 0, "it was in memory only, and nothing of it is believed"
    assert client.boot not in {"", boot}
    assert not plan.held
    assert not [*toy.wrong(plan, toy.chain(1, 40))], "old views stay readable"
    toy.put(client, 1)
    assert toy.resumed(client, 1) == 40


@pytest.mark.slow
def test_an_engine_goes_on_while_its_node_comes_and_goes(
    new_client: NewClient, new_node: NewNode
) -> None:
    node = new_node(nvme={"write_back": "eager"})
    node.start()
    seen: list[int] = []
    errors: list[BaseException] = []
    stopping = threading.Event()

    def engine() -> None:
        client = new_client(node, deadline_s=0.5)
        try:
            number = 0
            while not stopping.is_set():
                number += 1
                chain = toy.chain(number % 8, 40)
                plan = client.plan(f"e-{number}", chain, limit=40)
                with client.load(plan, wait_s=0.5) as loaded:
                    assert not [*toy.wrong(loaded, chain)] or not loaded.held
                    seen.append(loaded.boundary)
                client.save(f"e-{number}", chain, toy.state(chain, 40))
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            client.close()

    def hits() -> int:
        return sum(boundary == 40 for boundary in seen)

    thread = threading.Thread(target=engine)
    thread.start()
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        before = hits()
        assert eventually(lambda before=before: hits() > before + 50 or not thread.is_alive())  # type: ignore[misc]
        node.send(number)
        node.wait()
        node.start()
    before = hits()
    assert eventually(lambda: hits() > before + 50 or not thread.is_alive())
    stopping.set()
    thread.join()
    assert not errors
