"""Where everything lies: the areas of a symmetric chunk and the sizes that follow from a buffer's settings.

Every rank computes the same layout from the same settings, so an offset is an address on every rank.
"""

ALIGNMENT = 256  # bytes, of every area
# SMs with which remote loads fill the wire: 335 GB/s, with 8 SMs 320, with all 337 (measured on H200).
PULL_SMS = 32


def align(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


class Areas:
    """Named areas, one behind the other. `areas["name"]` is an offset in bytes, `areas.sizes["name"]` a
    size.
    """

    def __init__(self, **nbytes):
        self.offsets = {}
        self.sizes = {}
        self.nbytes = 0
        for name, size in nbytes.items():
            self.add(name, size)

    def add(self, name: str, nbytes: int) -> int:
        """Appends an area of `nbytes`; returns its offset."""
        self.offsets[name] = self.nbytes
        self.sizes[name] = nbytes
        self.nbytes += align(nbytes, ALIGNMENT)
        return self.offsets[name]

    def __getitem__(self, name: str) -> int:
        return self.offsets[name]


def ring_tokens(num_tokens: int, row_bytes: int, receive_bytes: int, ranks: int) -> int:
    """Tokens that a combine ring between two ranks holds: all if they fit into an eighth of the receive area,
    else as many as do.

    Even, since credits are given by halves; at least 64, so that small buffers do not run in lock step.
    """
    fitting = receive_bytes // 8 // max(ranks - 1, 1) // row_bytes
    return align(min(num_tokens, max(fitting, 64)), 2)


def default_num_sms(ranks: int, num_experts: int, num_topk: int, device_sms: int) -> int:
    """SMs that keep both the wire and the per-SM store rate busy in dispatch with uniform routing.

    A token is stored num_topk times in all and crosses the wire (ranks - 1) * (1 - miss) times, where miss is
    the chance that no expert of a token lies on a given rank. One SM stores about 60 GB/s, the wire carries
    about 350 GB/s (measured on H200).
    """
    miss = 1.0
    for i in range(num_topk):
        miss *= max(num_experts - num_experts // ranks - i, 0) / max(num_experts - i, 1)
    remote_rows = (ranks - 1) * (1 - miss)
    if remote_rows == 0:
        return device_sms
    return max(1, min(device_sms, round(num_topk / remote_rows * 350 / 60)))
