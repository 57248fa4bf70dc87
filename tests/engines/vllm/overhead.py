"""What the connector costs when nothing hits, and what a hit saves; measured on this machine, side by side.

    PYTHONPATH=.:adapters/vllm:kernels PYTHON_OF_VLLM -m tests.engines.vllm.overhead [rounds]

Two engines run the same prompts in turn, one with the connector and one without; every prompt is new, so
that the one with the connector asks, misses and saves for each. Then a prompt of 4,096 tokens is restored
and recomputed in turn, for the time to its first token. Prints JSON. A figure, and no test: it depends on
the machine and on what else it does.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.engines.vllm.engines import Engine, Json, prompt
from tiercache.testing.nodes import Launcher, NodeProcess

MODEL = "qwen3next"
PROMPTS = 16
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 32
PREFIX_TOKENS = 4096
SETTINGS: Json = {"max_model_len": 8192, "max_num_batched_tokens": 8192}


def start(folder: Path, name: str, socket: Path | None) -> Engine:
    """Start an engine; with a connector where there is a socket."""
    order: Json = {
        "model": MODEL,
        "folder": str(folder / "model"),
        "settings": SETTINGS,
        "cache_bytes": 64 << 20,
        **({"socket": str(socket), "connector": {"deadline_s": 5.0}} if socket else {}),
    }
    log = folder / name / "log"
    log.parent.mkdir()
    return Engine(order, log)


def batch(engine: Engine, prompts: Sequence[Sequence[int]]) -> Json:
    """Return the seconds that a batch of prompts takes."""
    orders = [{"ids": list(ids)} for ids in prompts]
    return engine.ask("timed", prompts=orders, tokens=OUTPUT_TOKENS)


def first_token(engine: Engine, ids: Sequence[int], salt: str) -> Json:
    """Return the seconds to the first token of one prompt."""
    order = {"ids": list(ids), "salt": salt}
    return engine.ask("timed", prompts=[order], tokens=1)


def main(rounds: int) -> None:
    """Measure, and print."""
    launcher = Launcher()
    with tempfile.TemporaryDirectory(prefix="tc-") as name:
        folder = Path(name)
        host: Json = {"bytes": "1GiB", "segment_bytes": "128MiB"}
        with NodeProcess(launcher, folder, host=host) as node:
            node.start()
            plain, ours = start(folder, "plain", None), start(folder, "ours", node.socket)
            told = {"misses": misses(plain, ours, rounds), "hit": hit(ours, rounds)}
            sys.stdout.write(json.dumps(told, indent=1) + "\n")
            plain.close()
            ours.close()
    launcher.close()


def misses(plain: Engine, ours: Engine, rounds: int) -> Json:
    """Return what 100 % misses cost, in batches and one request at a time."""
    batches: dict[str, list[Json]] = {"plain": [], "ours": []}
    single: dict[str, list[Json]] = {"plain": [], "ours": []}
    for turn in range(-1, rounds):
        for name, engine in (("plain", plain), ("ours", ours)):
            seed = 1000 * (turn + 2)
            took = batch(engine, [prompt(seed + n, PROMPT_TOKENS) for n in range(PROMPTS)])
            singly = [
                first_token(engine, prompt(seed + 100 + n, PROMPT_TOKENS), "") for n in range(8)
            ]
            if turn >= 0:  # The first turn warms up.
                batches[name].append(took)
                single[name] += singly
    told: Json = {}
    for clock in ("wall", "cpu"):
        ratios = [
            b[clock] / a[clock] for a, b in zip(batches["plain"], batches["ours"], strict=True)
        ]
        alone = {
            name: statistics.median(one[clock] for one in values) for name, values in single.items()
        }
        told[clock] = {
            "batch_s": {
                name: statistics.median(one[clock] for one in values)
                for name, values in batches.items()
            },
            "batch_ratios": sorted(round(ratio, 4) for ratio in ratios),
            "batch_ratio_median": statistics.median(ratios),
            "request_ms": {name: 1e3 * value for name, value in alone.items()},
            "request_ms_more": 1e3 * (alone["ours"] - alone["plain"]),
        }
    return told


def hit(ours: Engine, rounds: int) -> Json:
    """Return the time to the first token of a long prompt, restored and recomputed."""
    ids = prompt(7, PREFIX_TOKENS + 20)
    first_token(ours, ids, "")
    ours.ask("flush")
    restored: list[Json] = []
    computed: list[Json] = []
    for turn in range(rounds + 1):
        ours.ask("reset_local")
        took = first_token(ours, ids, "")
        fresh = first_token(ours, ids, f"new {turn}")
        if turn:
            restored.append(took)
            computed.append(fresh)
    told: Json = {}
    for clock in ("wall", "cpu"):
        one = statistics.median(took[clock] for took in restored)
        other = statistics.median(took[clock] for took in computed)
        told[clock] = {"restored_s": one, "recomputed_s": other, "times_faster": other / one}
    return told


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
