"""What a tenant may take on every node of a cluster, set once through any of them."""

import shutil
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tiercache.cli.app import app
from tiercache.cli.exits import Exit
from tiercache.cli.replies import Shared, ShareRow, ShareRows
from tiercache.testing.etcd import EtcdServer
from tiercache.testing.nodes import Launcher, NodeProcess, eventually
from tiercache.testing.towns import BACK_S, Town

pytestmark = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="no etcd here (Debian: etcd-server)"
)
TENANT = "0123abcd"


def run(node: NodeProcess, *words: str) -> Result:
    return CliRunner().invoke(app, ["quota", *words, "--socket", str(node.socket), "--json"])


def said(node: NodeProcess, *words: str) -> Shared:
    result = run(node, *words)
    assert result.exit_code == Exit.OK, result.stderr
    return msgspec.json.decode(result.stdout, type=Shared)


def share(node: NodeProcess) -> ShareRow | None:
    rows = msgspec.json.decode(run(node, "get").stdout, type=ShareRows).tenants
    return next((row for row in rows if row.tenant == TENANT), None)


def has(node: NodeProcess, host: float, nvme: float, *, common: bool = True) -> bool:
    def holds() -> bool:
        row = share(node)
        return row is not None and (row.host, row.nvme, row.common) == (host, nvme, common)

    return eventually(holds, BACK_S)


def test_a_share_holds_on_every_node_those_that_come_later_too(tmp_path: Path) -> None:
    etcd, launcher = EtcdServer(tmp_path), Launcher()
    etcd.start()
    with Town([etcd.url]) as town:
        a, b = (town.add(name, launcher) for name in ("a", "b"))
        assert town.settled("a", "b")
        assert run(b, "set", TENANT, "--host", "0.5").exit_code == Exit.OK
        done = said(a, "set", TENANT, "--host", "0.25", "--cluster")
        assert done == Shared(TENANT, 0.25, None)
        assert has(a, 0.25, 1.0)
        assert has(b, 0.25, 1.0)
        assert said(b, "set", TENANT, "--nvme", "0", "--cluster") == Shared(TENANT, 0.25, 0.0)
        assert has(a, 0.25, 0.0)
        own = run(b, "set", TENANT, "--host", "0.75")
        assert own.exit_code == Exit.USAGE
        assert "quota set --cluster" in own.stderr
        c = town.add("c", launcher)
        assert has(c, 0.25, 0.0)

        etcd.kill()
        assert run(a, "set", TENANT, "--host", "1", "--cluster").exit_code == Exit.REFUSED
        assert has(b, 0.25, 0.0), "what was said last goes on"
        etcd.start()
        assert eventually(lambda: run(a, "unset", TENANT).exit_code == Exit.OK, BACK_S)
        assert has(b, 0.5, 1.0, common=False)
        assert eventually(lambda: share(a) is None and share(c) is None, BACK_S)
    launcher.close()
    etcd.kill()


def test_a_node_without_a_cluster_says_so(tmp_path: Path) -> None:
    launcher = Launcher()
    with NodeProcess(launcher, tmp_path) as node:
        node.start()
        result = run(node, "set", TENANT, "--host", "0.5", "--cluster")
        assert result.exit_code == Exit.REFUSED
        assert "in no cluster" in result.stderr
    launcher.close()
