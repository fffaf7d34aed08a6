"""What is found out about a cluster, as plain values: the input of the assessment and of the page.

The probe of a node gives NodeReport, NodeFacts, GpuClock, Probe; each worker gives Rank and Speed;
all workers together give FactRow (collectives) and Link. What does not answer is a Silence.
Units: bytes, bytes/s, FLOP/s, seconds; sizes and rates of collectives as nccl-tests defines them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """A GPU as NVML tells of it."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_gib: float
    sm_clock_mhz: float
    sm_clock_max_mhz: float
    ecc_errors: int | None
    """Uncorrected since the driver was loaded; None: it has no ECC, or it is off."""
    remap_pending: bool | None
    """Rows of its memory wait for a reset to be replaced."""


@dataclass(frozen=True)
class NodeFacts:
    """What a probe sees on its node."""

    host: str
    versions: dict[str, str]
    devices: tuple[Device, ...]
    efa_devices: int
    shared_memory_bytes: int
    """Size of /dev/shm."""
    disk: str
    """The folder that Ray spills objects to."""
    disk_bytes: int
    disk_free_bytes: int
    open_files: int
    """The hard limit, to which Ray raises its own."""
    memlock_bytes: int | None
    """None: no limit."""


@dataclass(frozen=True)
class GpuClock:
    """How far a node's clock is ahead of the driver's."""

    offset_s: float
    error_s: float
    """Half of the round trip: the offset may be off by as much."""


@dataclass(frozen=True)
class Probe:
    """An object that was written under run.storage, read back and deleted."""

    size_bytes: int
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    error: str | None = None
    shared: bool | None = None
    """The driver's file is there; None: not known."""


@dataclass(frozen=True)
class NodeReport:
    """One node and what it answered; None is no answer."""

    id: str
    address: str
    host: str
    resources: dict[str, float]
    """What Ray has of it: CPU, GPU, object_store_memory (bytes)."""
    facts: NodeFacts | None = None
    clock: GpuClock | None = None
    probe: Probe | None = None

    @property
    def name(self) -> str:
        """Name it as people find it again: host, address, the start of Ray's id."""
        return f"{self.host} ({self.address}, {self.id[:8]})"


@dataclass(frozen=True)
class Speed:
    """What one worker's device does alone."""

    device: str
    """As the driver calls it, or cpu (one core)."""
    index: int | None
    """Of the GPU on its node."""
    flops: dict[str, float]
    """FLOP/s of a matrix product by precision."""
    memory_bytes_per_s: float
    """Read and written, in a copy."""
    clock_mhz: float | None = None
    throttled: tuple[str, ...] = ()
    """Why its clocks were held down while it worked."""


@dataclass(frozen=True)
class Rank:
    """One worker of the group."""

    rank: int
    node: str
    """Node.id."""
    lane: int
    """Its place among the workers of its node."""
    speed: Speed | None = None
    network: str | None = None
    """What NCCL sends through: efa, another libfabric provider, ib, socket; None: not known."""
    nccl: str | None = None


@dataclass(frozen=True)
class FactRow:
    """One collective of one size, as a line of nccl-tests."""

    operation: str
    size_bytes: int
    seconds: float
    algbw: float
    busbw: float
    wrong: int
    """Elements that were not what they had to be, over all workers."""


@dataclass(frozen=True)
class Link:
    """One direction between two nodes, all their workers in pairs at once."""

    sender: str
    receiver: str
    bytes_per_s: float
    pairs: int


@dataclass(frozen=True)
class Silence:
    """A step that someone did not finish."""

    node: str | None
    """Node.id; None: the group as a whole."""
    step: str
    why: str


@dataclass(frozen=True)
class ClusterFacts:
    """All that was found out."""

    versions: dict[str, str]
    """The driver's."""
    backend: str
    """nccl or gloo."""
    storage: str
    nodes: tuple[NodeReport, ...]
    ranks: tuple[Rank, ...] = ()
    rows: tuple[FactRow, ...] = ()
    links: tuple[Link, ...] = ()
    silences: tuple[Silence, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """What each part took."""

    def node(self, id: str) -> NodeReport:
        """Return the node of an id."""
        return next(node for node in self.nodes if node.id == id)
