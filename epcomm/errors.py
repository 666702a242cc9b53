"""The exceptions that epcomm raises beside ValueError and TypeError."""


class EpcommError(RuntimeError):
    """Root of epcomm's own errors."""


class DriverError(EpcommError):
    """A CUDA driver or operating-system call failed; the message names the call and its answer."""


class HandleError(EpcommError):
    """Memory could not be shared between ranks; the message names the ranks and the kind of handle."""


class PeerTimeoutError(EpcommError):
    """A peer did not come within the group's timeout. The object that raised it is dead until it is rebuilt.

    Attributes:
        operation: name of the operation that waited, or None.
        rank: the rank that raises.
        peers: the ranks that are late or gone, ascending.
        seen, wanted: the epoch found in the flag and the one waited for, or None.
    """

    def __init__(self, message, *, operation=None, rank=None, peers=(), seen=None, wanted=None):
        super().__init__(message)
        self.operation = operation
        self.rank = rank
        self.peers = tuple(peers)
        self.seen = seen
        self.wanted = wanted
