"""What operators install is true for this version: names of metrics, settings, files."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias, cast

import pytest
import yaml

from tiercache import config
from tiercache.budget import resolve_host_bytes
from tiercache.runtime import telemetry

Document: TypeAlias = "dict[str, Document] | list[Document] | str | int | float | bool | None"

UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
ALWAYS = {"instance", "job"}


def known() -> dict[str, dict[str, set[str]]]:
    """Return every series a node exposes: its name, its labels and the values they may have."""
    found: dict[str, dict[str, set[str]]] = {}
    for series in telemetry.COUNTERS:
        found[f"{series.name}_total"] = {series.label: set(series.values)} if series.label else {}
    for series in telemetry.GAUGES:
        found[series.name] = {series.label: set(series.values)} if series.label else {}
    for end in ("sum", "count"):
        found[f"{telemetry.HANDLE_SECONDS}_{end}"] = {}
    found[f"{telemetry.HANDLE_SECONDS}_bucket"] = {
        "le": {str(bound) for bound in telemetry.BUCKETS}
    }
    found["build_info"] = {}
    return {f"{telemetry.PREFIX}{name}": labels for name, labels in found.items()}


def branches(document: Document) -> Iterator[dict[str, Document]]:
    """Yield every mapping in a document."""
    if isinstance(document, dict):
        yield document
        for value in document.values():
            yield from branches(value)
    elif isinstance(document, list):
        for value in document:
            yield from branches(value)


def expressions(root: Path) -> dict[str, str]:
    """Return every query of the dashboard and the alerts, by where it stands."""
    found = {}
    board = cast("Document", json.loads((root / "ops/grafana/tiercache.json").read_text()))
    for number, target in enumerate(branches(board)):
        if "expr" in target:
            found[f"dashboard {number}"] = str(target["expr"])
    rules = cast("Document", yaml.safe_load((root / "ops/alerts/tiercache.rules.yml").read_text()))
    for rule in branches(rules):
        if "alert" in rule:
            found[str(rule["alert"])] = str(rule["expr"])
    return found


def problems(expression: str) -> Iterator[str]:
    """Yield what is wrong with the names in one query."""
    series = known()
    used: set[str] = set()
    for name, selector in re.findall(r"\b(tiercache_\w+)(?:\{([^}]*)\})?", expression):
        if name not in series:
            yield f"no metric {name}"
            continue
        used |= series[name].keys()
        for label, sign, values in re.findall(r'(\w+)\s*([=!~]+)\s*"([^"]*)"', selector):
            if label in ALWAYS:
                continue
            if label not in series[name]:
                yield f"{name} has no label {label}"
            elif unknown := set(values.split("|")) - series[name][label]:
                yield f"{name}: {label}{sign} never has {unknown}"
    for labels in re.findall(r"\bby\s*\(([^)]*)\)", expression):
        if missing := {label.strip() for label in labels.split(",")} - used - ALWAYS:
            yield f"nothing has the labels {missing}"


def test_every_query_names_what_a_node_measures(root: Path) -> None:
    queries = expressions(root)
    assert len(queries) > 20
    wrong = [f"{where}: {what}" for where, query in queries.items() for what in problems(query)]
    assert not wrong, "\n".join(wrong)


def test_wrong_names_are_found() -> None:
    assert list(problems("sum by (tier) (tiercache_leases)"))
    assert list(problems('tiercache_bytes{tier="tape"}'))
    assert list(problems("tiercache_lookups"))
    assert not list(problems('sum by (instance, tier) (tiercache_bytes{tier=~"host|nvme"})'))


def test_the_dashboard_is_whole(root: Path) -> None:
    board = json.loads((root / "ops/grafana/tiercache.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["targets"] and panel["description"] for panel in panels)
    taken = [
        (column, row)
        for spot in (panel["gridPos"] for panel in panels)
        for column in range(spot["x"], spot["x"] + spot["w"])
        for row in range(spot["y"], spot["y"] + spot["h"])
    ]
    assert len(taken) == len(set(taken)), "panels overlap"
    assert max(column for column, _ in taken) < 24


@pytest.mark.parametrize("words", [["check", "rules"], ["test", "rules"]])
def test_prometheus_takes_the_rules(root: Path, words: list[str]) -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    file = "tiercache.rules.yml" if words[0] == "check" else "tiercache.rules.test.yml"
    result = subprocess.run(
        [promtool, *words, file],
        cwd=root / "ops/alerts",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_takes_the_queries_of_the_dashboard(root: Path, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if not promtool:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    rules = [
        {
            "record": "query",
            "expr": query.replace("$__rate_interval", "5m"),
            "labels": {"at": where},
        }
        for where, query in expressions(root).items()
    ]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    result = subprocess.run(
        [promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_has_a_test_and_says_what_to_do(root: Path) -> None:
    rules = cast("Document", yaml.safe_load((root / "ops/alerts/tiercache.rules.yml").read_text()))
    tested = (root / "ops/alerts/tiercache.rules.test.yml").read_text()
    alerts = [branch for branch in branches(rules) if "alert" in branch]
    assert alerts
    for alert in alerts:
        fires = rf"alertname: {alert['alert']}\n +exp_alerts:\n +- exp_labels"
        assert re.search(fires, tested), f"{alert['alert']} is never shown to fire"
        notes = alert["annotations"]
        assert isinstance(notes, dict)
        assert {"summary", "action"} <= notes.keys()


# --- Kubernetes


@pytest.fixture(scope="module")
def manifests(root: Path) -> Mapping[str, dict[str, Document]]:
    """The manifest's objects by kind."""
    text = (root / "ops/k8s/daemonset.yaml").read_text()
    return {str(found["kind"]): found for found in yaml.safe_load_all(text)}


def test_the_daemonset_is_not_privileged(manifests: Mapping[str, dict[str, Document]]) -> None:
    for branch in branches(manifests["DaemonSet"]):
        for key in ("hostIPC", "hostPID", "hostNetwork", "privileged", "allowPrivilegeEscalation"):
            assert not branch.get(key), key
        if "image" in branch:
            context = cast("dict[str, Document]", branch["securityContext"])
            assert cast("dict[str, Document]", context["capabilities"])["drop"] == ["ALL"]
            assert context["readOnlyRootFilesystem"] is True


def test_the_daemonset_gives_the_memory_its_settings_take(
    manifests: Mapping[str, dict[str, Document]],
) -> None:
    files = cast("dict[str, str]", manifests["ConfigMap"]["data"])
    settings = config.parse(tomllib.loads(files["tiercache.toml"]), "ConfigMap")
    (node,) = (b for b in branches(manifests["DaemonSet"]) if b.get("name") == "node")
    resources = cast("dict[str, dict[str, str]]", node["resources"])
    limit = resources["limits"]["memory"]
    assert resources["requests"]["memory"] == limit
    memory_bytes = int(limit[:-2]) * UNITS[limit[-2:]]
    assert resolve_host_bytes(settings, memory_bytes) == settings.host.bytes
    mounts = {str(branch.get("mountPath")) for branch in branches(node)}
    for path in (settings.node.socket, settings.nvme.path):
        assert any(path.startswith(f"{mount}/") for mount in mounts), path
    bound = config.bind_address(settings.metrics.bind)
    assert bound is not None
    assert {"name": "metrics", "containerPort": bound[1]} in cast("list[Document]", node["ports"])
    paths = {
        str(branch["path"]) for branch in branches(node) if "port" in branch and "path" in branch
    }
    assert paths == {"/health", "/ready"}


# --- systemd, image


def test_the_example_settings_are_right(root: Path) -> None:
    settings = config.load(root / "ops/tiercache.toml")
    unit = (root / "ops/systemd/tiercache.service").read_text()
    assert "RuntimeDirectory=tiercache" in unit
    assert settings.node.socket.startswith("/run/tiercache/")
    assert "StateDirectory=tiercache" in unit
    assert settings.nvme.path.startswith("/var/lib/tiercache/")


def test_systemd_takes_the_unit(root: Path, tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if not verify:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    text = (root / "ops/systemd/tiercache.service").read_text()
    unit = tmp_path / "tiercache.service"  # The command must exist for systemd to be content.
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", text))
    result = subprocess.run(
        [verify, "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_the_image_is_small_and_nobodys_root(root: Path) -> None:
    text = (root / "ops/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    (user,) = (line.split()[1] for line in lines if line.startswith("USER"))
    assert user != "root"
    assert not user.startswith("0")
    assert not any("torch" in line or "[transformers]" in line for line in lines)
    copied = {
        name
        for line in lines
        if line.startswith("COPY") and "--from" not in line
        for name in line.split()[1:-1]
    }
    for name in copied:
        assert (root / name).exists(), name
    ignored = (root / "ops/Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} == {line for line in ignored if line.startswith("!")}


def test_the_image_is_built_from_all_packages(root: Path) -> None:
    with (root / "pyproject.toml").open("rb") as file:
        wheel = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = (root / "ops/Dockerfile").read_text()
    for package in wheel["packages"]:
        top = package.split("/")[0]
        assert f"COPY {top} {top}\n" in copied, package
