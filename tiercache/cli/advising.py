"""`tiercache advise`: would more memory pay? What a running node has learned."""

import typer

from tiercache.cli.asking import Deadline, Json, Socket, ask
from tiercache.cli.text import as_json, size

SAME = "1"


def advise(socket: Socket = "", deadline: Deadline = 5.0, json: Json = False) -> None:
    """Say what more or less host memory would save, by what the node saw so far."""

    with ask(socket, deadline) as node:
        gauges = node.stats().gauges
    curve = gauges.get("whatif_saved", {})
    policy = next((name for name, on in gauges.get("eviction_policy", {}).items() if on), "")
    capacity = gauges.get("capacity_bytes", {}).get("host", 0.0)
    if json:
        typer.echo(
            as_json({"policy": policy, "capacity_bytes": round(capacity), "saved_fraction": curve})
        )
        return
    typer.echo(f"Order of eviction: {policy or 'unknown'}. Host memory: {size(capacity)}.")
    same = curve.get(SAME, 0.0)
    if not any(curve.values()):
        typer.echo(
            "Nothing is known yet: too few conversations came back, or the policy is plain `lru`."
        )
        return
    typer.echo(f"Of all prefill, {same:.1%} is saved (estimated on a sample).")
    for factor, saved in sorted(curve.items(), key=lambda pair: float(pair[0])):
        if factor != SAME:
            word = "more" if saved >= same else "less"
            part = abs(saved - same)
            typer.echo(
                f"With {factor}x host memory ({size(capacity * float(factor))}) you would save "
                f"{part:.1%} {word} of it: {saved:.1%}."
            )
