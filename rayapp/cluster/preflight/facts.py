"""What the survey finds out about a cluster, as plain values: the input of `assess` and the page.

NodeReport, NodeFacts, GpuClock and Probe come from the probe of a node, Rank and Speed from each
worker, FactRow (collectives) and Link from all workers together. A step that is not answered is a
Silence. Units: bytes, bytes/s, FLOP/s, seconds; sizes and rates of collectives as in nccl-tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """A GPU as NVML describes it."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_gib: float
    sm_clock_mhz: float
    sm_clock_max_mhz: float
    ecc_errors: int | None
    """Uncorrected since the driver was loaded; None: the GPU has no ECC, or ECC is off."""
    remap_pending: bool | None
    """Memory rows wait for a reset to be remapped, or a remap has failed; None: not supported."""


@dataclass(frozen=True)
class NodeFacts:
    """What the probe finds on its node."""

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
    """The hard limit, to which Ray raises its soft limit."""
    memlock_bytes: int | None
    """None: no limit."""
    reached_at: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Interface and address that nccl and gloo take; without an entry it is not known."""


@dataclass(frozen=True)
class GpuClock:
    """How far a node's clock is ahead of the driver's."""

    offset_s: float
    error_s: float
    """Half the round trip: the offset may be wrong by as much."""


@dataclass(frozen=True)
class Probe:
    """The result of writing an object under run.storage, reading it back and deleting it."""

    size_bytes: int
    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    error: str | None = None
    shared: bool | None = None
    """Whether the node sees the driver's file; None: not known."""


@dataclass(frozen=True)
class NodeReport:
    """One node and its answers; None: no answer."""

    id: str
    address: str
    host: str
    resources: dict[str, float]
    """Ray's resources of the node: CPU, GPU, object_store_memory (bytes)."""
    facts: NodeFacts | None = None
    clock: GpuClock | None = None
    probe: Probe | None = None

    @property
    def name(self) -> str:
        """Its name in findings: host, address, and the first 8 characters of Ray's node id."""
        return f"{self.host} ({self.address}, {self.id[:8]})"


@dataclass(frozen=True)
class Speed:
    """The speed of one worker's device alone."""

    device: str
    """The driver's name of the GPU, or cpu (one core)."""
    index: int | None
    """NVML's index of the GPU on its node."""
    flops: dict[str, float]
    """FLOP/s of a matrix product by precision."""
    memory_bytes_per_s: float
    """Bytes read plus bytes written per second of a copy."""
    clock_mhz: float | None = None
    throttled: tuple[str, ...] = ()
    """NVML's reasons for reduced clocks under load."""


@dataclass(frozen=True)
class Rank:
    """One worker of the group."""

    rank: int
    node: str
    """NodeReport.id."""
    lane: int
    """Its index among the workers of its node."""
    speed: Speed | None = None
    network: str | None = None
    """Network that NCCL sends through, as `nccl.network_of` names it; None: not known."""
    nccl: str | None = None
    missing_kernels: tuple[str, ...] = ()
    """Packages for the model's layers that a GPU worker cannot import: of a node's first rank."""


@dataclass(frozen=True)
class FactRow:
    """One collective of one size, as a line of nccl-tests; algbw and busbw are in bytes/s."""

    operation: str
    size_bytes: int
    seconds: float
    algbw: float
    busbw: float
    wrong: int
    """Number of wrong elements in the results of all workers."""


@dataclass(frozen=True)
class Link:
    """One direction between two nodes: the sum of `pairs` pairs of workers that send at once."""

    sender: str
    receiver: str
    bytes_per_s: float
    pairs: int


@dataclass(frozen=True)
class Silence:
    """A step that a node or worker did not finish."""

    node: str | None
    """NodeReport.id; None: the group as a whole."""
    step: str
    why: str


@dataclass(frozen=True)
class ClusterFacts:
    """All that a survey has found."""

    versions: dict[str, str]
    """Versions on the driver."""
    backend: str
    """nccl or gloo."""
    storage: str
    nodes: tuple[NodeReport, ...]
    ranks: tuple[Rank, ...] = ()
    rows: tuple[FactRow, ...] = ()
    links: tuple[Link, ...] = ()
    silences: tuple[Silence, ...] = ()
    model_problem: str | None = None
    """Why no node was asked for the kernels of the model's layers, if they were wanted."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each part of the survey."""

    def node(self, id: str) -> NodeReport:
        """Return the node with an id."""
        return next(node for node in self.nodes if node.id == id)
