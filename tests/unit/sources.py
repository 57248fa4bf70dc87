"""Questions of one node to several others, for the tests of searches."""

from tiercache.core.cluster import commands as ccm
from tiercache.core.cluster import events as cev
from tiercache.core.cluster.peers import POOL
from tiercache.errors import Fault
from tiercache.state.names import short
from tiercache.testing.sim.pair import Nodes, clustered
from tiercache.testing.sim.rig import TOKENS, Client, Rig, hybrid

WAIT_S = 0.05


def three() -> Nodes:
    """Return node a, and two others."""
    return Nodes(a=Rig(clustered()), b=Rig(clustered()), c=Rig(clustered()))


def at(nodes: Nodes, name: str) -> Client:
    """Return a client of a node."""
    return Client(nodes.rigs[name], hybrid()).attach()


def first(nodes: Nodes) -> ccm.Locate:
    """Return the one question that is under way."""
    (question,) = nodes.rigs["a"].take(ccm.Locate)
    return question


def answered(nodes: Nodes, question: ccm.Locate, fault: Fault | None = None) -> ccm.Located:
    """Have whom it was sent to answer a question; with `fault`, the answer does not come through."""
    answer = nodes.ask("a", question)
    assert answer is not None
    nodes.answer("a", question.job, answer, fault)
    return answer


def told(client: Client, peer: str, *ends: int, version: int = 1) -> None:
    """Have a node told that another one could resume the prompt at these boundaries, true or not."""
    digests = client.chain(TOKENS).digests
    names = [short(client.namespace.digest, digests[end // 4]) for end in ends]
    since = client.rig.machine.cluster.version_of(peer)
    boot = "" if peer == POOL else "1"
    client.rig.tell(cev.PeerTold(peer, boot, version, True, names, [], since))
