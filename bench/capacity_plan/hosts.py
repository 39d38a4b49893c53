"""Hosts: a device, its link, and nodes with memory. The built-in ones are examples: rates of data sheets, with a share of them
that programs get; give your own by options, or by a file of 'bench/capacity --check --save'."""

import dataclasses
import json

GB, GIB = 10 ** 9, 1 << 30


class HostError(Exception):
    """A host that makes no sense; the text says why."""


@dataclasses.dataclass(frozen=True)
class Host:
    name: str
    device_bytes: float  # 0: the worker computes on the host's processors and keeps its part in the nodes' memory
    device_reserve: float  # of it, for the driver's context, libraries and what is lost between allocations
    device_rate: float  # bytes/s that a step gets of the weights
    key_rate: float  # bytes/s that scoring and selecting gets of the keys
    arithmetic: float  # operations/s of matrix products in a prefill (a multiplication and an addition are two)
    attention: float  # the same of its attention
    link_rate: float  # bytes/s of the link, each way; 0: there is none
    layer_s: float  # to and fro between worker and stores, of a layer
    step_s: float  # of a step, whatever is in it
    n_nodes: int
    node_bytes: float
    node_share: float  # of it, for rows
    node_rate: float  # bytes/s that a store gets of its node's memory, reading selected rows

    @property
    def has_device(self):
        return self.device_bytes > 0

    def check(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and not (isinstance(value, (int, float)) and 0 <= value < 1e24):
                raise HostError(f"{self.name}: {field.name} = {value!r} is no such number")
        for field in ("device_rate", "key_rate", "arithmetic", "attention", "n_nodes", "node_bytes", "node_share", "node_rate"):
            if not getattr(self, field):
                raise HostError(f"{self.name}: {field} is 0")
        if not 1 <= self.n_nodes <= 12 or self.n_nodes != int(self.n_nodes):
            raise HostError(f"{self.name}: {self.n_nodes} nodes; 1 to 12 stores serve a session")
        if self.node_share > 1:
            raise HostError(f"{self.name}: node_share is a share")
        if self.has_device and not self.link_rate:
            raise HostError(f"{self.name}: a device without a link")
        if self.has_device and self.device_reserve >= self.device_bytes:
            raise HostError(f"{self.name}: nothing is left of the device's memory")
        return self


BUILT_IN = {host.name: host for host in (
    # A device of 80 GB with 3.35 TB/s, 0.99 PFLOP/s f16 and PCIe 5 x16; two sockets of 8 channels DDR5-4800 (307 GB/s).
    # Shares that programs get: 80 % of device memory's rate, 40 % of its arithmetic, 80 % of the link, 60 % of the nodes'.
    Host("gpu-80g", 80 * GB, 1.5 * GIB, 2.7e12, 2.7e12, 4e14, 2e14, 50e9, 20e-6, 50e-6, 2, 512 * GIB, 0.9, 184e9),
    # The same device; four sockets of 8 channels DDR5-4800.
    Host("gpu-80g-4s", 80 * GB, 1.5 * GIB, 2.7e12, 2.7e12, 4e14, 2e14, 50e9, 20e-6, 50e-6, 4, 1024 * GIB, 0.9, 184e9),
    # 24 GB with 1.0 TB/s, 0.16 PFLOP/s and PCIe 4 x16; one socket, 2 channels DDR5-5600 (90 GB/s).
    Host("gpu-24g", 24 * GB, 1 * GIB, 8e11, 8e11, 6.4e13, 3.2e13, 25e9, 20e-6, 50e-6, 1, 128 * GIB, 0.9, 54e9),
)}


def of_file(path):
    """A host as --save wrote it."""
    try:
        with open(path, encoding="utf-8") as file:
            return Host(**json.load(file)["host"]).check()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HostError(f"{path}: not a host of 'bench/capacity --check --save': {error}") from error
