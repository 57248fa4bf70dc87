"""Our own stores keep the contract that is shipped for everybody's."""

import itertools
from collections.abc import Iterator, Sequence

import pytest

from tiercache.errors import StorageFault
from tiercache.testing import s3
from tiercache.testing.mooncake import MooncakeServers, why_not
from tiercache.testing.store_sets import SetsContract
from tiercache.testing.stores import StoreContract
from tiercache.tiers.remote import Pool
from tiercache.tiers.remote_memory import MemoryPool
from tiercache.tiers.remote_mooncake import MooncakePool
from tiercache.tiers.remote_s3 import S3Pool, S3Settings


class TestMemoryPool(StoreContract, SetsContract):
    @pytest.fixture(autouse=True)
    def shared(self) -> None:
        self.memory = MemoryPool()

    def connect(self) -> Pool:
        return self.memory


class Lent(MooncakePool):
    """A client takes long to close, and two are enough: each test gets them in turn."""

    def close(self, within_s: float) -> StorageFault | None:
        return None


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Lent]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    servers = MooncakeServers(tmp_path_factory.mktemp("mooncake"), segment_bytes=256 << 20)
    servers.start()
    pools = [Lent(servers.settings), Lent(servers.settings)]
    yield pools
    closed = [MooncakePool.close(pool, 10.0) for pool in pools]
    servers.stop()
    assert closed == [None, None]


class TestMooncakePool(StoreContract, SetsContract):
    @pytest.fixture(autouse=True)
    def servers(self, clients: Sequence[Lent]) -> None:
        self.clients = itertools.cycle(clients)

    def connect(self) -> Pool:
        return next(self.clients)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Settings]:
    reason = s3.why_not()
    if reason:
        pytest.skip(reason)
    server = s3.S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield S3Settings(s3.BUCKET, server.url, access_key="any", secret_key="any")
    server.kill()


class TestS3Pool(StoreContract, SetsContract):
    OPERATIONS = 400

    @pytest.fixture(autouse=True)
    def server(self, bucket: S3Settings) -> None:
        self.settings = bucket

    def connect(self) -> Pool:
        return S3Pool(self.settings)
