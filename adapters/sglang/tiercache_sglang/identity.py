"""The namespace of an engine: everything that SGLang's keys leave out."""

import os
from collections.abc import Sequence
from pathlib import Path

from tiercache.state import Layout, Namespace
from tiercache.state.canonical import digest
from tiercache_sglang.paths import scheme_of


def namespace_of(
    layout: Layout, *, model: str, weights: str, tokenizer: str, facts: Sequence[str], bigram: bool
) -> Namespace:
    """Return the namespace of pages with this layout.

    `facts`: whatever else makes equal tokens mean other bytes: the order of axes, the number of ranks,
    which stage of the pipeline this is, the versions of engine and quantisation.
    """
    about = digest("sglang", *facts).hex()
    return Namespace(
        model=model,
        weights=f"{weights}/{about}",
        tokenizer=tokenizer,
        layout=layout.fingerprint,
        chain=scheme_of(layout.block_tokens, bigram=bigram),
    )


def engine_name(given: str, data_parallel: int) -> str:
    """Return a name that the ranks of one engine share and no other engine has.

    Ranks are children of one launcher; in containers every launcher may be process 1, so its start
    counts, too. `given`: the user's own name, for ranks on several machines.
    """
    if given:
        return f"sglang/{given}/{data_parallel}"
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:  # A launcher outside of this container.
        started = "-"
    return f"sglang/{os.uname().nodename}/{parent}/{started}/{data_parallel}"
