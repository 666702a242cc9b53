"""Streams: which one a call runs on, the order of calls across streams, and events of finished calls."""

import contextlib
import threading


class CallOrder:
    """placeholder until the next commit"""

    def __init__(self):
        self.lock = threading.RLock()

    def enter(self, device, handle):
        pass

    def leave(self, device, handle):
        pass

    @contextlib.contextmanager
    def call(self, device, handle):
        with self.lock:
            yield


def resolve(device, stream):
    return device.handle(device.current_stream() if stream is None else stream)


def order_of(device):
    return CallOrder()
