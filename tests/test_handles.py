"""Passing descriptors between ranks, and finding out which kind of handle works."""

import array
import dataclasses
import os
import secrets
import socket
import subprocess
import sys
import threading
import time

import pytest
from ranks import on_gpus, run_ranks

from epcomm.errors import HandleError
from epcomm.runtime.handles import check_peers, handle_kind, share
from epcomm.runtime.mailbox import Mailbox
from epcomm.testing import run_threads


@pytest.fixture(autouse=True)
def no_descriptor_is_lost():
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def exchange_all(ranks, timeout=10.0, late=()):
    """Every rank, a thread each, hands out a descriptor of its own; returns what each got, or its error."""
    mailboxes = [Mailbox() for _ in range(ranks)]
    names = [mailbox.name for mailbox in mailboxes]
    own = [os.memfd_create(f"rank-{rank}") for rank in range(ranks)]
    results = [None] * ranks

    def run(rank):
        time.sleep(0.3 if rank in late else 0)
        try:
            got = mailboxes[rank].exchange(rank, names, own[rank], timeout)
        except HandleError as error:
            results[rank] = error
            return
        results[rank] = [None if fd is None else os.fstat(fd).st_ino for fd in got]
        for fd in got:
            if fd is not None:
                os.close(fd)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [os.fstat(fd).st_ino for fd in own]
    for fd in own:
        os.close(fd)
    for mailbox in mailboxes:
        mailbox.close()
    return results, expected


@pytest.mark.parametrize(
    "ranks, late", [(1, ()), (2, ()), (3, (1,)), (24, ()), (24, (0,)), (24, range(1, 24))]
)
def test_everybody_gets_everybodys_descriptor(ranks, late):
    results, own = exchange_all(ranks, late=late)
    for rank, got in enumerate(results):
        assert got == [None if source == rank else own[source] for source in range(ranks)]


def test_a_rank_that_sends_nothing_is_named_in_time():
    with Mailbox() as mine, Mailbox() as theirs, Mailbox() as others:
        descriptor = os.memfd_create("mine")
        start = time.monotonic()
        with pytest.raises(HandleError, match=r"no descriptor came from rank 0, 2 within 0.2 s"):
            mine.exchange(1, [theirs.name, mine.name, others.name], descriptor, 0.2)
        assert time.monotonic() - start < 1
        os.close(descriptor)


def test_a_rank_that_has_gone_is_named():
    with Mailbox() as mine:
        descriptor = os.memfd_create("mine")
        with pytest.raises(
            HandleError, match="rank 1 does not listen: it has failed, or runs in another network namespace"
        ):
            mine.exchange(0, [mine.name, f"epcomm-{secrets.token_hex(16)}"], descriptor, 5)
        os.close(descriptor)


def test_a_full_mailbox_is_named():
    with Mailbox() as mine, Mailbox() as full, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as flood:
        flood.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                flood.sendto(b"x", f"\0{full.name}")
        descriptor = os.memfd_create("mine")
        with pytest.raises(
            HandleError, match=r"no descriptor came from rank 1; rank 1 took none within 0.2 s"
        ):
            mine.exchange(0, [mine.name, full.name], descriptor, 0.2)
        os.close(descriptor)


def send(name, data, descriptors):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendmsg([data], rights, 0, f"\0{name}")


def test_messages_that_are_no_rank_s_are_ignored():
    with Mailbox() as mine, Mailbox() as theirs:
        junk, good, descriptor = (os.memfd_create(name) for name in ("junk", "good", "mine"))
        rank_1 = (1).to_bytes(4, "little")
        send(mine.name, b"", [junk])  # no rank
        send(mine.name, b"\x01\x00\x00\x00\x00", [junk, junk])  # two descriptors
        send(mine.name, rank_1, [])  # none
        send(mine.name, (0).to_bytes(4, "little"), [junk])  # from itself
        send(mine.name, (2).to_bytes(4, "little"), [junk])  # from a rank that is not there
        send(mine.name, rank_1, [good])
        send(mine.name, rank_1, [junk])  # a second time
        got = mine.exchange(0, [mine.name, theirs.name], descriptor, 5)
        assert got[0] is None and os.fstat(got[1]).st_ino == os.fstat(good).st_ino
        for fd in (junk, good, descriptor, got[1]):
            os.close(fd)


def test_messages_of_other_users_are_ignored(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    for result in exchange_all(2, timeout=0.2)[0]:
        assert "no descriptor came from rank" in str(result) and "1 messages of other users ignored" in str(
            result
        )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_a_real_other_user_gets_nothing_in():
    code = (
        "import array, os, socket, sys\n"
        "os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0]))]\n"
        "s.sendmsg([b'\\1\\0\\0\\0'], rights, 0, chr(0) + sys.argv[1])\n"
    )
    with Mailbox() as mine, Mailbox() as theirs:
        subprocess.run([sys.executable, "-c", code, mine.name], check=True, stdin=subprocess.DEVNULL)
        descriptor = os.memfd_create("mine")
        with pytest.raises(HandleError, match="1 messages of other users ignored"):
            mine.exchange(0, [mine.name, theirs.name], descriptor, 0.1)
        os.close(descriptor)


# ---- the kind of handle


def kind_and_size(group):
    chunks = share(group, group.device.allocator.granularity)
    return handle_kind(group), [chunk.size for chunk in chunks] == [
        group.device.allocator.granularity
    ] * group.size


def test_all_ranks_find_the_same_kind():
    kinds = run_ranks(2, kind_and_size)
    assert kinds[0] == kinds[1] and kinds[0][0] in ("fd", "fabric") and kinds[0][1]
    if not on_gpus():
        assert kinds[0][0] == "fd"


def failure(group, error):
    with pytest.raises(error) as caught:
        handle_kind(group)
    return str(caught.value)


@pytest.mark.parametrize(
    "wish, error, message",
    [
        ("nvlink", ValueError, "EPCOMM_HANDLE_TYPE: expected fd or fabric, got 'nvlink'"),
        ("fabric", HandleError, "memory of the CPU device is exported as a file descriptor, not as 'fabric'"),
    ],
)
def test_a_wish_that_cannot_be_had(monkeypatch, wish, error, message):
    monkeypatch.setenv("EPCOMM_HANDLE_TYPE", wish)
    for text in run_threads(2, failure, error, timeout=5):
        assert message in text


def elsewhere(group, **fields):
    """Rank r's record with the r-th of `fields`."""
    group.peers = tuple(
        dataclasses.replace(peer, **{name: values[rank] for name, values in fields.items()})
        for rank, peer in enumerate(group.peers)
    )
    return failure(group, HandleError)


def test_ranks_in_several_network_namespaces_are_told_so():
    for text in run_threads(2, elsewhere, net_namespace=[11, 22], timeout=5):
        assert (
            "between network namespaces" in text
            and "rank 0 in 11; rank 1 in 22" in text
            and "--network=host" in text
        )


def test_cpu_ranks_on_several_hosts_are_told_so(monkeypatch):
    for text in run_threads(2, elsewhere, boot_id=["a", "b"], host=["one", "two"], timeout=5):
        assert "the ranks run on one, two" in text and "fabric" in text
    monkeypatch.setenv("EPCOMM_HANDLE_TYPE", "fd")
    for text in run_threads(2, elsewhere, boot_id=["a", "b"], host=["one", "two"], timeout=5):
        assert "the ranks run on one, two" in text and "file descriptors cannot leave a host" in text


def test_devices_that_cannot_reach_each_other_are_named():
    def check(group):
        class Allocator:
            def reaches(self, device_uuid):
                return {group.rank, int(device_uuid)} != {0, 2}

        group.device.allocator = Allocator()
        group.peers = tuple(
            dataclasses.replace(peer, device=f"cuda:{rank}", device_uuid=str(rank))
            for rank, peer in enumerate(group.peers)
        )
        with pytest.raises(HandleError) as caught:
            check_peers(group)
        return str(caught.value)

    for text in run_threads(3, check, timeout=5):
        assert (
            "of rank 0 cannot map memory of cuda:2 of rank 2" in text
            and "of rank 2 cannot map memory of cuda:0" in text
        )
        assert "rank 1" not in text
