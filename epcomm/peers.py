"""Who the ranks of a group are: host, process, device; and whether a rank's process is still there."""

import os
import select
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """What a rank tells the others about itself.

    Attributes:
        boot_id: tells hosts apart; the same in all containers of one host, which host names are not.
        host: host name, for messages.
        pid, pid_start: process id and start time in clock ticks since boot (pids are reused, pairs are not).
        pid_namespace, net_namespace: inodes; a pid or an abstract socket is known in its own namespace only.
        uid: effective user id.
        progress: file descriptor, in that process, of the memory in which it counts its host barriers.
        device, device_name, device_uuid, bus_id: "cuda:0", its product name, its UUID and PCI address; for
            the CPU "cpu", "cpu", "" and "".
    """

    boot_id: str
    host: str
    pid: int
    pid_start: int
    pid_namespace: int
    net_namespace: int
    uid: int
    progress: int
    device: str = ""
    device_name: str = ""
    device_uuid: str = ""
    bus_id: str = ""

    @property
    def process(self):
        """Equal for two ranks that are threads of one process."""
        return self.boot_id, self.pid_namespace, self.pid, self.pid_start

    def __str__(self):
        return f"{self.host} pid {self.pid} {self.device}"


def boot_id():
    """What tells this host, as it runs now, from every other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def process_start(pid):
    """Start time of a process in clock ticks since boot; None if it is gone or hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def here(progress):
    """The Peer record of this process, before a device is chosen. `progress`: see Peer."""
    pid = os.getpid()
    return Peer(
        boot_id=boot_id(), host=socket.gethostname(), pid=pid, pid_start=process_start(pid),
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino, net_namespace=os.stat("/proc/self/ns/net").st_ino,
        uid=os.geteuid(), progress=progress,
    )  # fmt: skip


def describe(device):
    """device, device_name, device_uuid and bus_id of a Device, as keyword arguments of Peer."""
    if device.kind == "cpu":
        return {"device": "cpu", "device_name": "cpu"}
    from cupy.cuda import runtime

    return {
        "device": str(device),
        "device_name": runtime.getDeviceProperties(device.index)["name"].decode(),
        "device_uuid": device.allocator.uuid,
        "bus_id": runtime.deviceGetPCIBusId(device.index),
    }


def alive(me, peer):
    """Whether the process of `peer` still runs: True, False, or None where this process `me` cannot tell."""
    if peer.process == me.process:
        return True
    if (peer.boot_id, peer.pid_namespace) != (me.boot_id, me.pid_namespace):
        return None
    try:
        pidfd = os.pidfd_open(peer.pid)
    except ProcessLookupError:
        return False
    except OSError:  # no such call in this sandbox
        return process_start(peer.pid) == peer.pid_start
    try:
        start = process_start(peer.pid)
        if start is not None and start != peer.pid_start:
            return False  # another process by now
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)  # readable once the process has ended, even if nobody has waited for it yet
    finally:
        os.close(pidfd)


def barriers_entered(me, peer):
    """How many host barriers of the group `peer` has entered; None where this process cannot tell."""
    if (peer.boot_id, peer.pid_namespace) != (me.boot_id, me.pid_namespace):
        return None
    try:
        with open(f"/proc/{peer.pid}/fd/{peer.progress}", "rb") as file:
            return int.from_bytes(file.read(8), "little")
    except OSError:  # gone, or another user's
        return None
