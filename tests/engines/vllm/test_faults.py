"""A node that fails costs hits and nothing else: no request fails, no token is wrong, nothing hangs."""

import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from tests.engines.vllm.engines import Engine, Json, NewEngine, NewNode, difference, prompt
from tiercache.testing.nodes import Launcher, NodeProcess, eventually

PROMPTS = [prompt(seed, 300 + 40 * seed) for seed in range(1, 7)]
ANSWER_S = 60.0
"""How long a request may take on a busy machine, whatever happens to the node."""

CONNECTOR = {"deadline_s": 0.5, "load_s": 4.0, "retry_s": 0.05, "failure_s": 0.3}


@dataclass
class Stage:
    """An engine on a node, and what it computes uncached."""

    engine: Engine
    node: NodeProcess
    folder: Path
    expected: list[Json] = field(default_factory=list)

    def run(self, at: int) -> Json:
        """Run a prompt with nothing in vLLM's own cache; it must come out right."""
        began = time.monotonic()
        self.engine.ask("reset_local")
        (found,) = self.engine.generate(PROMPTS[at])
        assert time.monotonic() - began < ANSWER_S
        self.right(at, found)
        return found

    def right(self, at: int, found: Json) -> None:
        """The answer is the uncached one, bit for bit."""
        assert found["reason"] == "length"
        assert found["tokens"] == self.expected[at]["tokens"]
        assert difference(found, self.expected[at]) == 0.0

    def hook(self, mode: str, **more: object) -> None:
        """Change what the hooks do."""
        self.engine.ask("hook", mode=mode, folder=str(self.folder), **more)

    def begin(self, at: int, *, hold: str) -> "Future[Json]":
        """Run a prompt until it is held still; `let_go` lets it go on."""
        for name in ("held", "go"):
            (self.folder / name).unlink(missing_ok=True)
        self.hook(hold)
        answer = _pool.submit(self.run, at)
        assert eventually((self.folder / "held").exists)
        return answer

    def let_go(self) -> None:
        """See `begin`."""
        (self.folder / "go").touch()

    def hits_again(self) -> None:
        """Within some tries the node gives hits again."""

        def hit() -> bool:
            self.run(0)
            self.engine.ask("flush")
            return bool(self.run(0)["cached"])

        assert eventually(hit, ANSWER_S)


_pool = ThreadPoolExecutor(1)
_fresh = count(10_000)


@pytest.fixture(scope="module")
def engine_and_node(
    new_engine: NewEngine, new_node: NewNode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    node = new_node()
    engine = new_engine("qwen3next", node.socket, connector=CONNECTOR)
    stage = Stage(engine, node, tmp_path_factory.mktemp("hooks"))
    stage.expected = [engine.generate(ids, salt=f"alone {at}")[0] for at, ids in enumerate(PROMPTS)]
    yield stage
    engine.close()


@pytest.fixture
def stage(engine_and_node: Stage) -> Iterator[Stage]:
    """A node that has all prompts, and no faults yet."""
    stage = engine_and_node
    stage.hook("")
    for at in range(len(PROMPTS)):
        stage.run(at)
    stage.engine.ask("flush")
    assert eventually(lambda: stage.run(1)["cached"] == 256)
    yield stage
    stage.hook("")
    if not stage.node.running:
        stage.node.start()
    stage.hits_again()


@pytest.mark.parametrize("mode", ["fail", "partial", "random"])
def test_loads_that_fail(stage: Stage, mode: str) -> None:
    before = stage.engine.ask("counts")
    stage.hook(mode)
    for _ in range(3):
        for at in range(len(PROMPTS)):
            stage.run(at)
    after = stage.engine.ask("counts")
    failed = after["loads_failed"] - before["loads_failed"]
    assert 0 < failed <= 3 * len(PROMPTS), "a failed load is not tried again and again"
    assert after["questions"] - before["questions"] <= 2 * 3 * len(PROMPTS)


def test_killed_while_loading(stage: Stage) -> None:
    answer = stage.begin(2, hold="hold")
    stage.node.kill()
    stage.let_go()
    answer.result(ANSWER_S)


def test_killed_while_saving(stage: Stage) -> None:
    stage.node.kill()
    stage.node.start()
    assert eventually(lambda: _attached(stage))
    fresh = prompt(77, 300)
    for name in ("held", "go"):
        (stage.folder / name).unlink(missing_ok=True)
    stage.hook("hold_save")
    stage.engine.ask("reset_local")
    (first,) = stage.engine.generate(fresh)
    assert eventually((stage.folder / "held").exists)
    stage.node.kill()
    stage.let_go()
    stage.engine.ask("reset_local")
    (second,) = stage.engine.generate(fresh)
    assert (first["tokens"], second["cached"]) == (second["tokens"], 0)


def _attached(stage: Stage) -> bool:
    stage.engine.generate(prompt(next(_fresh), 140), tokens=1)
    return bool(stage.engine.ask("counts").get("attached") == 1)


@pytest.mark.parametrize("pause_s", [0.05, 1.0, 10.0])
def test_killed_and_back_later(stage: Stage, pause_s: float) -> None:
    stage.node.kill()
    back = threading.Timer(pause_s, stage.node.start)
    back.start()
    ran = 0
    while back.is_alive() or ran < 3:
        stage.run(ran % len(PROMPTS))
        ran += 1
    back.join()
    stage.hits_again()


def test_stopped_and_continued(stage: Stage) -> None:
    stage.node.send(signal.SIGSTOP)
    began = time.monotonic()
    for at in range(len(PROMPTS)):
        stage.run(at)
    assert time.monotonic() - began < ANSWER_S
    stage.node.send(signal.SIGCONT)
    stage.hits_again()


def test_stopped_while_loading(stage: Stage) -> None:
    answer = stage.begin(3, hold="hold")
    stage.node.send(signal.SIGSTOP)
    stage.let_go()
    answer.result(ANSWER_S)
    stage.node.send(signal.SIGCONT)


def test_asleep_and_awake(stage: Stage) -> None:
    """vLLM has connectors forget all when its caches are discarded: other weights may have come."""
    stage.engine.ask("sleep", level=1)
    assert stage.run(1)["cached"] == 0
    stage.engine.ask("flush")
    assert stage.run(1)["cached"] == 256, "saved anew"
    for at in range(len(PROMPTS)):
        stage.run(at)


@pytest.fixture(scope="module")
def crowded_node(new_node: NewNode) -> NodeProcess:
    return new_node()


@pytest.fixture(scope="module")
def crowded(new_engine: NewEngine, crowded_node: NodeProcess) -> Iterator[Engine]:
    """An engine whose pool is so small that requests are preempted. In float32, where tokens do not depend
    on what else is in the batch."""
    engine = new_engine(
        "granite",
        crowded_node.socket,
        connector=CONNECTOR,
        cache_bytes=9 << 18,
        settings={"max_model_len": 640},
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("mode", ["", "random", "partial", "fail"])
def test_aborted_and_preempted_at_random(
    crowded: Engine, crowded_node: NodeProcess, mode: str
) -> None:
    prompts = [prompt(seed, 150 + 40 * seed) for seed in range(1, 7)]
    expected = [
        crowded.generate(ids, salt=f"alone {at}", tokens=150)[0] for at, ids in enumerate(prompts)
    ]
    chance = random.Random(4)
    crowded.ask("hook", mode=mode)
    before = _preempted(crowded)
    for _ in range(3):
        crowded.ask("reset_local")
        abort = {str(at): chance.randrange(80) for at in range(6) if chance.random() < 0.3}
        orders = [{"ids": ids} for ids in prompts]
        found = crowded.ask("generate", prompts=orders, tokens=150, abort=abort)
        for answer, right in zip(found, expected, strict=True):
            if not answer.get("aborted"):
                assert answer["tokens"] == right["tokens"]
    crowded.ask("hook", mode="")
    assert _preempted(crowded) > before
    assert eventually(lambda: crowded_node.gauge("leases") == 0), "everything was let go"


def _preempted(engine: Engine) -> float:
    metrics = engine.ask("metrics")
    return float(sum(value for name, value in metrics.items() if "preemptions" in name))


def test_a_full_disk(new_engine: NewEngine, engine_and_node: Stage) -> None:
    """Host memory for a few objects, and a disk that fills up."""
    unshare = shutil.which("unshare")
    with tempfile.TemporaryDirectory(prefix="tc-") as folder:
        disk = Path(folder) / "disk"
        disk.mkdir()
        script = f'mount -t tmpfs -o size=3m tmpfs {disk} && exec "$@"'
        command = [unshare or "unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
        if not unshare or subprocess.run([*command, "true"], check=False).returncode:
            pytest.skip("needs unshare and mount in a user namespace")
        launcher = Launcher(command)
        try:
            nvme: Json = {"path": str(disk / "nvme"), "cap_bytes": "64MiB"}
            node = NodeProcess(
                launcher,
                Path(folder),
                nvme={**nvme, "segment_bytes": "1MiB", "write_back": "eager"},
                host={"bytes": "2MiB", "segment_bytes": "1MiB"},
            )
            with node:
                node.start()
                engine = new_engine("qwen3next", node.socket, connector=CONNECTOR)
                stage = Stage(engine, node, Path(folder), engine_and_node.expected)
                for _ in range(3):
                    for at in range(len(PROMPTS)):
                        stage.run(at)
                        engine.ask("flush")
                assert node.counter("nvme_faults", "no_space") > 0
                engine.close()
        finally:
            launcher.close()
