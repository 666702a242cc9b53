"""Passing file descriptors between the ranks of one host, over abstract Unix datagram sockets, one a rank."""

import array
import contextlib
import errno
import os
import secrets
import selectors
import socket
import struct
import time

from ..errors import HandleError

_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid
_RETRY = 0.002  # seconds until a full queue is tried again: no wake-up for unconnected datagram sockets
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)  # its queue, or our share of descriptors in flight


class Mailbox:
    """A socket to which the other ranks send their descriptors; its random name must reach them first.

    Only messages of processes of this user count: any process of the host may find the name.
    """

    def __init__(self):
        self._strangers = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.setblocking(False)
            self.name = f"epcomm-{secrets.token_hex(16)}"
            self._socket.bind(_address(self.name))
        except OSError as error:
            self._socket.close()
            raise HandleError(f"opening a mailbox for descriptors: {error.strerror}") from None

    def exchange(self, rank, names, descriptor, timeout) -> list:
        """Sends `descriptor` to every other rank and waits for theirs.

        Args:
            rank: this rank; the index of its own name.
            names: the mailbox names of all ranks, all of them bound by now.
            descriptor: stays the caller's.
            timeout: seconds.

        Returns:
            By rank, a descriptor that the caller closes; None for the own rank.

        Raises:
            HandleError: descriptors did not come in time, or a rank cannot be reached.
        """
        deadline = time.monotonic() + timeout
        # Receiving between sends keeps the queues short: they hold as little as 10 messages, and a cycle of
        # ranks that only send could fill them for good. Every rank starts with its successor, so they do not
        # all send to rank 0 first.
        unsent = [(rank + step) % len(names) for step in range(1, len(names))]
        received = {}
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                while unsent or len(received) < len(names) - 1:
                    unsent = [peer for peer in unsent if not self._send(rank, peer, names[peer], descriptor)]
                    while self._receive(received, rank, len(names)):
                        pass
                    missing = [r for r in range(len(names)) if r != rank and r not in received]
                    left = deadline - time.monotonic()
                    if left <= 0 and (unsent or missing):
                        raise HandleError(self._late(timeout, missing, unsent))
                    if unsent or missing:
                        selector.select(min(left, _RETRY) if unsent else left)
        except BaseException:
            for fd in received.values():
                os.close(fd)
            raise
        return [received.get(r) for r in range(len(names))]

    def close(self):
        """Gives the address back."""
        self._socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _send(self, rank, peer, name, descriptor) -> bool:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        try:  # not socket.send_fds: it ignores its address before Python 3.13
            self._socket.sendmsg([_RANK.pack(rank)], [rights], 0, _address(name))
        except OSError as error:
            if error.errno in _FULL:
                return False
            if error.errno in (errno.ECONNREFUSED, errno.ENOENT):
                raise HandleError(
                    f"rank {peer} does not listen: it has failed, or runs in another network namespace"
                ) from None
            raise HandleError(f"passing a descriptor to rank {peer}: {error.strerror}") from None
        return True

    def _receive(self, received, rank, ranks) -> bool:
        """Takes one message off the queue; False if there was none."""
        size = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_RANK.size, size, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        descriptors, uid = array.array("i"), None
        for _, kind, payload in ancillary:
            if kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) // 4 * 4])
            elif kind == socket.SCM_CREDENTIALS:
                uid = _CREDENTIALS.unpack(payload)[1]
        with contextlib.ExitStack() as stack:
            for fd in descriptors:
                stack.callback(os.close, fd)
            source = _RANK.unpack(data)[0] if len(data) == _RANK.size else rank
            if uid != os.getuid():
                self._strangers += 1
            elif len(descriptors) == 1 and source < ranks and source != rank and source not in received:
                received[source] = descriptors[0]
                stack.pop_all()
        return True

    def _late(self, timeout, missing, unsent):
        parts = [f"no descriptor came from rank {_list(missing)}"] if missing else []
        parts += [f"rank {_list(unsent)} took none"] if unsent else []
        parts += [f"{self._strangers} messages of other users ignored"] if self._strangers else []
        return f"{'; '.join(parts)} within {timeout:g} s"


def _address(name):
    return f"\0{name}"


def _list(ranks):
    return ", ".join(map(str, ranks))
