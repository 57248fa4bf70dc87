"""What the connector costs when nothing hits, and what a hit saves; measured on this machine, side by side.

    PYTHONPATH=.:adapters/vllm:kernels PYTHON_OF_VLLM -m tests.engines.vllm.overhead [rounds]

Two engines run the same prompts in turn, one with the connector and one without, and then other pairs of
two; every prompt is new, so that the one with the connector asks, misses and saves for each. Then a
prompt of 4,096 tokens is restored and recomputed in turn, for the time to its first token. Prints JSON. A
figure, and no test: it depends on the machine and on what else it does.
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
CLOCKS = ("wall", "cpu", "engine")
PAIRS = 5
"""Pairs of processes: how fast one is depends on where its memory lies, by as much as is measured here."""
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
    pairs: list[Json] = []
    with tempfile.TemporaryDirectory(prefix="tc-") as name:
        folder = Path(name)
        host: Json = {"bytes": "1GiB", "segment_bytes": "128MiB"}
        with NodeProcess(launcher, folder, host=host) as node:
            node.start()
            for pair in range(PAIRS):
                plain, ours = _two(folder, pair, node.socket)
                pairs.append(misses(plain, ours, rounds, 1_000_000 * (pair + 1)))
                plain.close()
                if pair == PAIRS - 1:
                    told = {"misses": _of(pairs), "hit": hit(ours, rounds)}
                ours.close()
            sys.stdout.write(json.dumps(told, indent=1) + "\n")
    launcher.close()


def _two(folder: Path, pair: int, socket: Path) -> tuple[Engine, Engine]:
    """Return an engine without a connector, and one with it; they start in turn."""
    kinds: list[tuple[str, Path | None]] = [("plain", None), ("ours", socket)]
    found = {
        name: start(folder, f"{name}-{pair}", path)
        for name, path in (kinds if pair % 2 == 0 else reversed(kinds))
    }
    return found["plain"], found["ours"]


def misses(plain: Engine, ours: Engine, rounds: int, seeds: int) -> Json:
    """Return what 100 % misses cost one pair, in batches and one request at a time: by clock, the median of
    the ratios and of the milliseconds of one request, without and with."""
    batches: dict[str, list[Json]] = {"plain": [], "ours": []}
    single: dict[str, list[Json]] = {"plain": [], "ours": []}
    for turn in range(-1, rounds):
        for name, engine in (("plain", plain), ("ours", ours)):
            seed = seeds + 1000 * (turn + 2)
            took = batch(engine, [prompt(seed + n, PROMPT_TOKENS) for n in range(PROMPTS)])
            singly = [
                first_token(engine, prompt(seed + 100 + n, PROMPT_TOKENS), "") for n in range(8)
            ]
            if turn >= 0:  # The first turn warms up.
                batches[name].append(took)
                single[name] += singly
    told: Json = {}
    for clock in CLOCKS:
        both = zip(batches["plain"], batches["ours"], strict=True)
        told[clock] = {
            "batch_ratio": statistics.median(b[clock] / a[clock] for a, b in both),
            **{
                f"request_ms_{name}": 1e3 * statistics.median(one[clock] for one in values)
                for name, values in single.items()
            },
        }
    return told


def _of(pairs: Sequence[Json]) -> Json:
    """Return each figure of each pair, and the medians over them."""
    told: Json = {}
    for clock in CLOCKS:
        of = [pair[clock] for pair in pairs]
        more = [one["request_ms_ours"] - one["request_ms_plain"] for one in of]
        ratios = [one["batch_ratio"] for one in of]
        told[clock] = {
            "request_ms": [(one["request_ms_plain"], one["request_ms_ours"]) for one in of],
            "request_ms_more": more,
            "request_ms_more_median": statistics.median(more),
            "batch_ratios": ratios,
            "batch_ratio_median": statistics.median(ratios),
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
    for clock in CLOCKS:
        one = statistics.median(took[clock] for took in restored)
        other = statistics.median(took[clock] for took in computed)
        told[clock] = {"restored_s": one, "recomputed_s": other, "times_faster": other / one}
    return told


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
