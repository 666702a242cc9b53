"""How ranks hand each other memory.

Every rank allocates a piece and gets the pieces of all others, by one of two kinds of handle: a file
descriptor, passed over Unix sockets between ranks of one host, or a 64-byte fabric handle, passed through the
communicator, which also works between hosts of one NVLink domain. Which kind works is found out by trying:
what devices say about fabric handles is not reliable.

Everything here is collective, and either succeeds on all ranks or raises on all ranks.
"""

import contextlib
import os
import weakref

from ..errors import DriverError, HandleError
from .mailbox import Mailbox
from .mapped import MappedRange

KINDS = ("fd", "fabric")
_kinds = weakref.WeakKeyDictionary()  # group -> the kind of handle that works in it


def together(group, what, function):
    """Calls `function` on every rank; returns what it returned, by rank. If it raises on one, all raise."""
    value = problem = None
    try:
        value = function()
    except Exception as error:
        problem = error
    try:
        return group.gather(what, value, problem=problem)
    finally:
        problem = None  # it knows this frame: what it holds would live until the garbage collector comes


def share(group, nbytes, kind=None) -> list:
    """Allocates `nbytes` zeroed bytes on every rank; returns the allocations of all ranks, by rank.

    Args:
        group: the Group; collective.
        nbytes: the same on all ranks, a multiple of the device's granularity.
        kind: of handle, "fd" or "fabric"; None = the one that works in this group.

    Raises:
        DriverError, HandleError: on every rank if any could not allocate, export or open memory.
        ValueError: on every rank if `nbytes` differs.
    """
    kind = kind or handle_kind(group)
    allocator = group.device.allocator
    group.agree("shared memory", {"nbytes": nbytes})
    own = opened = mailbox = None
    with contextlib.ExitStack() as stack:

        def offer():
            nonlocal own, mailbox
            own = allocator.allocate(nbytes, kind)
            if kind == "fabric":
                return own.export()
            mailbox = stack.enter_context(Mailbox())
            return mailbox.name

        def accept():
            nonlocal opened
            handles = offers
            if kind == "fd":
                descriptor = own.export()
                stack.callback(os.close, descriptor)
                # Half the time, so that a rank that waited in vain still meets the others at the step's end.
                handles = mailbox.exchange(group.rank, offers, descriptor, group.timeout / 2)
                for handle in set(handles) - {None}:
                    stack.callback(os.close, handle)
            opened = [
                own if rank == group.rank else allocator.open(handle, nbytes, kind)
                for rank, handle in enumerate(handles)
            ]

        offers = together(group, f"allocating {nbytes} bytes to share", offer)
        together(group, "opening the memory of the other ranks", accept)
    return opened


def handle_kind(group) -> str:
    """The kind of handle that works between all ranks of the group, "fd" or "fabric". Collective at first.

    Descriptors first if all ranks run on one host, else fabric handles; EPCOMM_HANDLE_TYPE=fd|fabric allows
    that one alone.

    Raises:
        HandleError: on every rank; no kind works, with the ranks' reasons for each kind; or two devices
            cannot reach each other.
        ValueError: on every rank; EPCOMM_HANDLE_TYPE is unknown or differs between ranks.
    """
    if group not in _kinds:
        _kinds[group] = _find_kind(group)
    return _kinds[group]


def check_peers(group):
    """Raises HandleError on every rank, naming the pair, if a device cannot reach another one's memory."""

    def reach():
        me = group.peers[group.rank]
        cut_off = [
            f"{group.device} of rank {group.rank} cannot map memory of {peer.device} of rank {rank}"
            for rank, peer in enumerate(group.peers)
            if peer.boot_id == me.boot_id and not group.device.allocator.reaches(peer.device_uuid)
        ]
        if cut_off:
            raise HandleError("; ".join(cut_off) + " (no peer access between the devices)")

    together(group, "reaching the devices of the other ranks", reach)


def _find_kind(group):
    wish = os.environ.get("EPCOMM_HANDLE_TYPE") or None
    problem = None
    if wish is not None and wish not in KINDS:
        problem = f"EPCOMM_HANDLE_TYPE: expected fd or fabric, got {wish!r}"
    group.agree("shared memory", {"EPCOMM_HANDLE_TYPE": wish}, problem)
    check_peers(group)
    hosts = {peer.boot_id: peer.host for peer in group.peers}
    candidates = (wish,) if wish else KINDS if len(hosts) == 1 else ("fabric",)
    reasons = []
    for kind in candidates:
        try:
            if kind == "fd":
                _require_one_place(group, hosts)
            _probe(group, kind)
        except (DriverError, HandleError) as error:
            reasons.append(f"{kind}: {error}")
        else:
            return kind
    where = f", and the ranks run on {', '.join(hosts.values())}" if len(hosts) > 1 else ""
    what = f"memory of their {group.device.kind} devices"
    raise HandleError(f"the ranks cannot share {what}{where}; tried {'; '.join(reasons)}")


def _require_one_place(group, hosts):
    if len(hosts) > 1:
        raise HandleError("file descriptors cannot leave a host")
    if len({peer.net_namespace for peer in group.peers}) > 1:
        places = "; ".join(f"rank {rank} in {peer.net_namespace}" for rank, peer in enumerate(group.peers))
        raise HandleError(
            f"file descriptors cannot be passed between network namespaces, and the ranks run in several "
            f"({places}): give their containers one network, as with --network=host"
        )


def _probe(group, kind):
    """Shares one granule and maps everybody's."""
    allocator = group.device.allocator
    allocations = share(group, allocator.granularity, kind)
    together(group, "mapping the memory of the other ranks", lambda: MappedRange(allocator, allocations).size)
