"""Counting descriptors: what is ours counts, what libraries keep open for a while does not."""

import os
import socket

from tiercache.testing.descriptors import open_descriptors


def test_files_and_local_sockets_count_and_tcp_does_not() -> None:
    before = open_descriptors()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one, server.accept()[0] as other:
            assert one.fileno() != other.fileno()
            assert open_descriptors() == before
        left, right = socket.socketpair()
        reading, writing = os.pipe()
        assert open_descriptors() == before + 4
    for end in (left, right):
        end.close()
    for descriptor in (reading, writing):
        os.close(descriptor)
    assert open_descriptors() == before
