"""A small hybrid model whose state can be told from any other: bytes follow from part and prefix."""

import hashlib
import itertools
import os
from collections.abc import Iterator

from tiercache.client import Blob, Client, Flushed, Plan, Saved, Scope
from tiercache.state import Chain, Kind, Layout, Namespace, Part, Tensor

BLOCK_TOKENS = 16
TOKENS = 40
"""How long a prompt is unless said otherwise: it ends inside a block."""

WAIT_S = 20.0

KV = Part("kv", Kind.KV, None, BLOCK_TOKENS, 1, (Tensor("k", "float16", (64,), ("dim",)),))
STATE = Part("state", Kind.RECURRENT, 1, 0, 1, (Tensor("s", "float32", (1500,), ("dim",)),))
CONV = Part("conv", Kind.CONV, 1, 0, 1, (Tensor("c", "bfloat16", (3, 96), ("tap", "channel")),))
LAYOUT = Layout((KV, STATE, CONV), BLOCK_TOKENS)
NAMESPACE = Namespace.of(LAYOUT, model="toy", weights="w1", tokenizer="t1")


def chain(number: int, tokens: int = TOKENS) -> Chain:
    """Return the chain of a prompt of its own: no two numbers share a block."""
    return Chain([number * 7919 + position for position in range(tokens)], BLOCK_TOKENS)


def content(part: Part, prefix: Chain, end: int, nbytes: int, salt: str = "") -> bytes:
    """Return the bytes that `part` has after the first `end` tokens."""
    name = f"{part.name}/{salt}/".encode()
    return hashlib.shake_128(name + prefix.digest_at(end)).digest(nbytes)


def state(prefix: Chain, boundary: int = TOKENS, salt: str = "") -> list[Blob]:
    """Return all that must be held to resume at `boundary`."""
    found = []
    for part in LAYOUT.parts:
        starts = [0] if part.is_snapshot else range(0, boundary, part.block_tokens)
        for start in starts:
            end = boundary if part.is_snapshot else min(start + part.block_tokens, boundary)
            nbytes = part.nbytes(end - start, part.whole)
            held = content(part, prefix, end, nbytes, salt)
            found.append(Blob(part.name, end, memoryview(held), start))
    return found


def wrong(plan: Plan, prefix: Chain, salt: str = "") -> Iterator[str]:
    """Yield what a loaded plan holds, lacks or misplaces that is not the model's state there."""
    expected = {(blob.part, blob.end): blob for blob in state(prefix, plan.boundary, salt)}
    for blob in plan.blobs if plan.boundary else ():
        right = expected.pop((blob.part, blob.end), None)
        if right is None:
            yield f"{blob.part} at {blob.end} does not belong to {plan.boundary}"
        elif blob.data != right.data or blob.start != right.start:
            yield f"{blob.part} at {blob.end} has other bytes"
    if plan.boundary:
        yield from (f"{part} at {end} is missing" for part, end in expected)


def save(client: Client, number: int, tokens: int = TOKENS, salt: str = "") -> Saved:
    """Store all that resuming at the end of a prompt takes."""
    prompt = chain(number, tokens)
    scope = Scope(salt=salt)
    return client.save(f"save-{number}", prompt, state(prompt, tokens, salt), scope=scope)


def put(client: Client, number: int, tokens: int = TOKENS, salt: str = "") -> Flushed:
    """Store a prompt's state and wait until it is on disk, as far as it has earned that."""
    save(client, number, tokens, salt)
    return client.flush(durable=True, wait_s=WAIT_S)


def is_put(client: Client, number: int, tokens: int = TOKENS, salt: str = "") -> bool:
    """Whether a prompt's state could be stored for good; False when in doubt."""
    boot = client.boot
    declined = save(client, number, tokens, salt).declined
    flushed = client.flush(durable=True, wait_s=WAIT_S)
    told = not (declined or flushed.waiting or flushed.lost or flushed.reason)
    return told and boot != "" and client.boot == boot


def resumed(client: Client, number: int, tokens: int = TOKENS, salt: str = "") -> int:
    """Return where a prompt can be resumed. AssertionError when the bytes there are not its own."""
    prompt = chain(number, tokens)
    plan = client.plan(_request(), prompt, limit=tokens, scope=Scope(salt=salt))
    with client.load(plan, wait_s=WAIT_S) as loaded:
        found = [*wrong(loaded, prompt, salt)]
        assert not found or not loaded.held, found
        return loaded.boundary


_requests = itertools.count(1)


def _request() -> str:
    return f"resume-{os.getpid()}-{next(_requests)}"
