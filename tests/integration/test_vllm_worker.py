"""A worker of the vLLM adapter on a real node: ranks, faults, limits. The tensors are vLLM's in form."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from signal import SIGCONT, SIGSTOP

import pytest
import torch

from tests.unit.test_vllm_geometry import kimi
from tests.unit.test_vllm_pages import BLOCKS, cut, tensors
from tiercache.client import Client, Options
from tiercache.state import Chain, Namespace
from tiercache.testing.nodes import NodeProcess, eventually
from tiercache_vllm.geometry import geometry_of
from tiercache_vllm.pages import PartBlocks
from tiercache_vllm.settings import Item, Job, Settings, Work, tagged
from tiercache_vllm.working import Results, Worker

CHAIN = Chain(tuple(range(512)), 128)
LAYOUT = geometry_of(kimi(1), 1).layout
NAMESPACE = Namespace.of(LAYOUT, model="kimi", weights="1", tokenizer="1")
ENDED = Results(frozenset({"r"}), frozenset())
FAILED = Results(frozenset({"r"}), frozenset({"r"}))

NewWorker = Callable[..., Worker]


def items(end: int, *blocks: int) -> tuple[Item, ...]:
    """Return all objects of the prefix that ends at `end`: pages in `blocks`, states in the last."""
    conv, latent, recurrent = range(3)
    last = blocks[-1]
    return (
        Item(conv, end, CHAIN.digest_at(end), (last, last)),
        *(
            Item(latent, 128 * (n + 1), CHAIN.digest_at(128 * (n + 1)), (block,))
            for n, block in enumerate(blocks)
        ),
        Item(recurrent, end, CHAIN.digest_at(end), (last, last)),
    )


def job(name: str, found: Sequence[Item], salt: str = "") -> Job:
    return Job(name, name, "", salt, tuple(found))


def saving(*jobs: Job) -> Work:
    return Work(NAMESPACE, saves=jobs)


def loading(*jobs: Job) -> Work:
    return Work(NAMESPACE, loads=jobs)


@pytest.fixture
def new_worker(node: NodeProcess) -> Iterator[NewWorker]:
    made: list[Worker] = []

    def make(
        held: Mapping[str, torch.Tensor], ranks: int = 1, rank: int = 0, **settings: float
    ) -> Worker:
        options = Options(ranks=ranks, rank=rank, name="engine", deadline_s=2.0, retry_s=0.0)
        chosen = replace_settings(Settings(str(node.socket), load_s=10.0), settings)
        worker = Worker(chosen, geometry_of(kimi(ranks), ranks), held, BLOCKS, options)
        made.append(worker)
        return worker

    yield make
    for worker in made:
        worker.close()


def replace_settings(settings: Settings, changed: Mapping[str, float]) -> Settings:
    import msgspec

    return msgspec.structs.replace(settings, **changed)


def ended(worker: Worker) -> Results:
    """Return the results once there are some."""
    found: list[Results] = []

    def some() -> bool:
        found.append(worker.results(idle=True))
        return bool(found[-1].ended)

    assert eventually(some)
    return found[-1]


def empty(ranks: int = 1) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(t) for name, t in tensors(ranks).items()}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).view(BLOCKS, -1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_ranks_save_others_load(new_worker: NewWorker, ranks: int, node: NodeProcess) -> None:
    whole = tensors()
    held = [cut(whole, ranks, rank) for rank in range(ranks)]
    for rank in range(ranks):
        worker = new_worker(held[rank], ranks, rank)
        worker.save(saving(job("w", items(256, 2, 3))))
        assert worker.flush(10.0)
        report = worker.report()
        assert report is not None
        assert not report.unsaved
        assert report.counts["saved_objects"] == (4 if rank == 0 else 2), "latents once"
    for rank in range(ranks):
        target = {name: torch.zeros_like(t) for name, t in held[rank].items()}
        worker = new_worker(target, ranks, rank)
        worker.begin(loading(job("r", items(256, 5, 1))))
        assert ended(worker) == ENDED
        for name, tensor in target.items():
            blocks = [5, 1] if name == "3" else [1]
            source = [2, 3] if name == "3" else [3]
            assert torch.equal(flat(tensor)[blocks], flat(held[rank][name])[source])
            others = [at for at in range(BLOCKS) if at not in blocks]
            assert not flat(tensor)[others].any(), "nothing else was touched"
    assert node.counter("protocol_errors") == 0


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1)])
def test_another_number_of_ranks_loads_it(new_worker: NewWorker, before: int, after: int) -> None:
    whole = tensors()
    for rank in range(before):
        worker = new_worker(cut(whole, before, rank), before, rank)
        worker.save(saving(job("w", items(256, 2, 3))))
        assert worker.flush(10.0)
    order = replace(job("r", items(256, 5, 1)), chain=b"".join(CHAIN.digests[1:3]))
    for rank in range(after):
        expected = cut(whole, after, rank)
        target = {name: torch.zeros_like(t) for name, t in expected.items()}
        worker = new_worker(target, after, rank)
        worker.begin(loading(replace(order, chain=b"")))
        assert ended(worker) == FAILED, "only where it will do"
        worker.begin(loading(order))
        assert ended(worker) == ENDED
        for name, tensor in target.items():
            blocks, source = ([5, 1], [2, 3]) if name == "3" else ([1], [3])
            assert torch.equal(flat(tensor)[blocks], flat(expected[name])[source])


def test_what_is_not_there_fails_and_writes_no_more(new_worker: NewWorker) -> None:
    target = empty()
    worker = new_worker(target)
    worker.begin(loading(job("r", items(256, 5, 1))))
    assert ended(worker) == FAILED
    assert not any(flat(t).any() for t in target.values())


def test_tenants_load_their_own(new_worker: NewWorker) -> None:
    worker = new_worker(tensors())
    worker.save(saving(job("w", items(128, 2), salt="a")))
    assert worker.flush(10.0)
    other = new_worker(empty())
    other.begin(Work(NAMESPACE, loads=(job("r", items(128, 2), salt="b"),)))
    assert ended(other) == FAILED
    other.begin(Work(NAMESPACE, loads=(job("r", items(128, 2), salt="a"),)))
    assert ended(other) == ENDED


def test_a_load_without_a_namespace_or_a_place_fails(new_worker: NewWorker) -> None:
    worker = new_worker(empty())
    worker.begin(Work(None, loads=(job("r", items(128, 2)),), doomed=frozenset({"d"})))
    assert worker.results() == Results(frozenset({"r", "d"}), frozenset({"r", "d"}))
    assert worker.results() == Results(frozenset(), frozenset())


def test_a_node_that_is_away_costs_no_step(new_worker: NewWorker, node: NodeProcess) -> None:
    worker = new_worker(tensors())
    node.kill()
    began = time.monotonic()
    for at in range(50):
        worker.begin(loading(job(f"{at}", items(128, 2))))
        worker.save(saving(job(f"{at}", items(128, 2))))
    assert time.monotonic() - began < 5.0
    assert worker.flush(20.0)
    found = worker.results()
    assert found.ended == found.failed == {str(at) for at in range(50)}
    report = worker.report()
    assert report is not None
    assert report.unsaved == {CHAIN.digest_at(128)}
    node.start()

    def stored() -> bool:
        worker.save(saving(job("w", items(128, 2))))
        worker.flush(10.0)
        report = worker.report()
        return report is not None and report.counts.get("saved_objects", 0) > 0

    assert eventually(stored), "it attaches again by itself"


def test_a_node_that_stands_still_fails_a_load_in_time(
    new_worker: NewWorker, node: NodeProcess
) -> None:
    worker = new_worker(tensors(), load_s=0.5)
    worker.save(saving(job("w", items(128, 2))))
    assert worker.flush(10.0)
    node.send(SIGSTOP)
    began = time.monotonic()
    worker.begin(loading(job("r", items(128, 2))))
    assert ended(worker) == FAILED
    assert time.monotonic() - began < 10.0
    node.send(SIGCONT)


def test_a_node_that_speaks_otherwise_is_no_node(new_worker: NewWorker, node: NodeProcess) -> None:
    worker = new_worker(tensors())
    node.kill()
    node.socket.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(node.socket))
        listener.listen()

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(b"\x00\x00\x00\x05HTTP/1.1 400\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        for at in range(3):
            worker.begin(loading(job("r", items(128, 2))))
            assert ended(worker) == FAILED
            worker.save(saving(job(f"{at}", items(128, 2))))
            assert worker.flush(10.0)
        report = worker.report()
        assert report is not None
        assert report.unsaved == {CHAIN.digest_at(128)}
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10.0)


def test_more_than_may_wait_is_not_saved(new_worker: NewWorker) -> None:
    page = 128 * 1152
    worker = new_worker(tensors(), save_bytes_max=page)
    worker.save(saving(job("w", items(256, 2, 3))))
    report = worker.report()
    assert report is not None
    assert report.unsaved == {CHAIN.digest_at(128), CHAIN.digest_at(256)}
    assert report.counts == {"save_dropped": 4}
    tenant = job("w", items(256, 2, 3), salt="a")
    worker.save(saving(tenant))
    again = worker.report()
    assert again is not None
    assert tagged(CHAIN.digest_at(128), "", "a") in again.unsaved


def test_a_device_without_memory_costs_a_save(
    new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = new_worker(tensors())

    def full(self: PartBlocks, blocks: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(PartBlocks, "gather", full)
        worker.save(saving(job("w", items(128, 2))))
    assert worker.flush(10.0)
    report = worker.report()
    assert report is not None
    assert report.unsaved == {CHAIN.digest_at(128)}
    assert report.counts == {"save_failed": 3}
    worker.save(saving(job("w", items(128, 2))))
    assert worker.flush(10.0)
    again = worker.report()
    assert again is not None
    assert again.counts["saved_objects"] == 3


def test_what_was_copied_is_what_the_block_held_then(new_worker: NewWorker) -> None:
    """The block is somebody else's right after the step."""
    held = tensors()
    before = {name: t.clone() for name, t in held.items()}
    worker = new_worker(held)
    worker.save(saving(job("w", items(128, 2))))
    for tensor in held.values():
        tensor.view(torch.uint8).zero_()
    assert worker.flush(10.0)
    target = empty()
    reader = new_worker(target)
    reader.begin(loading(job("r", items(128, 4))))
    assert ended(reader) == ENDED
    for name, tensor in target.items():
        assert torch.equal(flat(tensor)[4], flat(before[name])[2])


def test_asleep_nothing_begins(new_worker: NewWorker) -> None:
    worker = new_worker(tensors())
    worker.save(saving(job("w", items(128, 2))))
    worker.sleep()
    worker.sleep()
    assert worker.flush(10.0), "what was copied is saved all the same"
    worker.begin(loading(job("r", items(128, 2))))
    assert worker.results() == FAILED
    worker.save(saving(job("w", items(256, 2, 3))))
    report = worker.report()
    assert report is not None
    assert report.counts["saved_objects"] == 3
    assert report.counts["save_dropped"] == 4
    worker.wake()
    worker.begin(loading(job("r", items(128, 2))))
    assert ended(worker) == ENDED


def test_asleep_nothing_is_written(new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the blocks goes as soon as a worker says that it sleeps, whatever it was doing."""
    new_worker(tensors()).save(saving(job("w", items(128, 2))))
    target = empty()
    worker = new_worker(target)
    within, go = threading.Event(), threading.Event()
    scatter = PartBlocks.scatter

    def slow(self: PartBlocks, blocks: Sequence[Sequence[int]], objects: torch.Tensor) -> None:
        within.set()
        assert go.wait(10.0)
        scatter(self, blocks, objects)

    def loads() -> bool:
        worker.begin(loading(job("r", items(128, 4))))
        assert eventually(lambda: within.is_set() or bool(worker.results().ended))
        return within.is_set()  # What was saved may not be there yet.

    with monkeypatch.context() as patched:
        patched.setattr(PartBlocks, "scatter", slow)
        assert eventually(loads)
        asleep = threading.Thread(target=worker.sleep)
        asleep.start()
        asleep.join(0.05)
        assert asleep.is_alive(), "a block is being written"
        go.set()
        asleep.join(10.0)
        assert not asleep.is_alive()
    written = {name: t.clone() for name, t in target.items()}
    assert ended(worker).failed == {"r"}
    assert all(torch.equal(flat(t), flat(written[name])) for name, t in target.items())
    worker.wake()
    worker.begin(loading(job("r", items(128, 4))))
    assert ended(worker) == ENDED


def test_a_new_namespace_is_another_client(new_worker: NewWorker) -> None:
    worker = new_worker(tensors())
    worker.save(saving(job("w", items(128, 2))))
    assert worker.flush(10.0)
    other = replace(NAMESPACE, weights="2")
    worker.begin(Work(other, loads=(job("r", items(128, 2)),)))
    assert ended(worker) == FAILED


def test_objects_of_another_size_are_refused(new_worker: NewWorker, node: NodeProcess) -> None:
    """Nothing of it is written; the request computes."""
    from tiercache.client import Blob
    from tiercache_vllm.chains import KnownChain

    known = KnownChain({128: CHAIN.digest_at(128)}, 128)
    options = Options(deadline_s=5.0)
    with Client.attach(node.socket, NAMESPACE, LAYOUT, options=options) as client:
        blobs = []
        for part in LAYOUT.parts:
            nbytes = part.nbytes(part.block_tokens, part.whole)
            start = 0
            codec = "native" if part.name != "recurrent" else "int8"
            size = nbytes if codec == "native" else 64
            blobs.append(Blob(part.name, 128, memoryview(bytes(size)), start, codec=codec))
        saved = client.save("w", known, blobs)
        assert saved.stored == 3
    worker = new_worker(empty())
    worker.begin(loading(job("r", items(128, 2))))
    assert ended(worker) == FAILED, "an object in another codec is another object"


def test_closing_leaves_no_thread(new_worker: NewWorker) -> None:
    before = threading.active_count()
    worker = new_worker(tensors())
    assert threading.active_count() > before
    worker.close()
    assert threading.active_count() == before
    worker.begin(loading(job("r", items(128, 2))))
    assert worker.results() == FAILED
