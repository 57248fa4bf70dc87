"""One engine process of the demo: it opens sessions on the recall models and answers prompts.

Orders come as JSON, one per line, on standard input; each is answered by one line on standard output.
"""

import logging
import sys
from typing import BinaryIO

import msgspec
import torch

from tiercache.client import Client, Options, Plan
from tiercache.testing.recall import load_model
from tiercache_transformers.identity import namespace_of
from tiercache_transformers.layout import form_of
from tiercache_transformers.session import CachedModel, Pace

CHUNK_TOKENS = 256
NUDGE = 1e-3
DEADLINE_S = 10.0
"""Long: the demo would rather be slow on a busy machine than show a miss."""


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """Opens a session. No `socket`: nothing is cached. `nudged`: one weight is a little different."""

    session: str
    model: str
    socket: str = ""
    tokenizer: str = "token ids"
    dtype: str = "float32"
    nudged: bool = False
    salt: str = ""


class Ask(msgspec.Struct, frozen=True, tag="ask", forbid_unknown_fields=True):
    """Runs a prompt and chooses `count` tokens greedily."""

    session: str
    prompt: tuple[int, ...]
    count: int


class Flush(msgspec.Struct, frozen=True, tag="flush", forbid_unknown_fields=True):
    """Waits until what has earned it is on NVMe."""

    session: str
    wait_s: float


class Touch(msgspec.Struct, frozen=True, tag="touch", forbid_unknown_fields=True):
    """Calls the session's node, which re-attaches when it was away. That it was away is not logged: the
    demo killed it itself."""

    session: str


class Opened(msgspec.Struct, frozen=True, tag="opened", forbid_unknown_fields=True):
    """Answers `Open` and `Touch`: the status of the session's client."""

    status: str


class Answer(msgspec.Struct, frozen=True, tag="answer", forbid_unknown_fields=True):
    """Answers `Ask`. `logits` are the raw bytes of what the tokens were chosen from. `waited`: the
    state was not in the node's host memory."""

    reused: int
    recomputed: int
    ttft_s: float
    waited: bool
    reason: str
    tokens: tuple[int, ...]
    logits: bytes


class Flushed(msgspec.Struct, frozen=True, tag="flushed", forbid_unknown_fields=True):
    """Answers `Flush`: objects that were not there in time, objects that were lost, and what kept
    the node from answering ("" when it did)."""

    waiting: int
    lost: int
    reason: str


Order = Open | Ask | Flush | Touch
Reply = Opened | Answer | Flushed


class Engine:
    """The sessions of this process."""

    def __init__(self) -> None:
        self._models: dict[str, CachedModel[Plan]] = {}
        self._clients: dict[str, Client] = {}

    def handle(self, order: Order) -> Reply:
        """Carry out one order."""
        match order:
            case Open():
                return Opened(self._open(order))
            case Ask(session, prompt, count):
                return self._ask(session, prompt, count)
            case Flush(session, wait_s):
                done = self._clients[session].flush(durable=True, wait_s=wait_s)
                return Flushed(done.waiting, done.lost, done.reason)
            case Touch(session):
                return Opened(self._touch(self._clients[session]))

    def close(self) -> None:
        """Close every client."""
        for client in self._clients.values():
            client.close()

    def _open(self, order: Open) -> str:
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[order.dtype]
        model = load_model(order.model, dtype=dtype)
        if order.nudged:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += NUDGE
        form = form_of(model)
        client = None
        if order.socket:
            namespace = namespace_of(model, form.layout, order.tokenizer, name=order.model)
            options = Options(name="demo", deadline_s=DEADLINE_S)
            client = Client.attach(order.socket, namespace, form.layout, options=options)
            self._clients[order.session] = client
        pace = Pace(chunk_tokens=CHUNK_TOKENS, wait_s=DEADLINE_S, salt=order.salt)
        self._models[order.session] = CachedModel(model, form, client, pace)
        return client.status if client else "uncached"

    @staticmethod
    def _touch(client: Client) -> str:
        log = logging.getLogger("tiercache.client")
        log.setLevel(logging.ERROR)
        try:
            client.flush(wait_s=0.0)
        finally:
            log.setLevel(logging.NOTSET)
        return client.status

    def _ask(self, session: str, prompt: tuple[int, ...], count: int) -> Answer:
        done = self._models[session].generate(prompt, count)
        return Answer(
            reused=done.prompt.reused,
            recomputed=done.prompt.recomputed,
            ttft_s=done.prompt.ttft_s,
            waited=done.prompt.waited,
            reason=done.prompt.reason,
            tokens=done.tokens,
            logits=done.logits.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )


def serve(orders: BinaryIO, replies: BinaryIO) -> None:
    """Answer orders until there are no more."""
    engine = Engine()
    decoder = msgspec.json.Decoder[Order](Order)
    try:
        for line in orders:
            replies.write(msgspec.json.encode(engine.handle(decoder.decode(line))) + b"\n")
            replies.flush()
    finally:
        engine.close()


if __name__ == "__main__":
    logging.basicConfig(format="engine %(process)d: %(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(
        1
    )  # More threads sum in another order, and cost more than they give here.
    serve(sys.stdin.buffer, sys.stdout.buffer)
