"""Values that formulas of the planner read: a :class:`Work` for memory, a :class:`Run` for time."""

from dataclasses import dataclass, field

from course_pp.base.sizes import ModelConfig
from course_pp.plan.cluster import Cluster
from course_pp.plan.layout import Layout


@dataclass(frozen=True)
class Constants:
    """Numbers that no data sheet has.

    Attributes:
        matmul_efficiency: share of the peak that large products reach. Fitted.
        memory_passes: bytes that a forward moves over bytes that a layer keeps. Fitted.
        link_efficiency: share of a link's bandwidth that a collective reaches.
    """

    matmul_efficiency: float = 0.6737
    memory_passes: float = 2.517
    link_efficiency: float = 0.8


@dataclass(frozen=True)
class Work:
    """A model laid out on ranks. A rank's memory depends only on this, on any cluster.

    Attributes:
        seq_len: tokens in a sequence.
    """

    model: ModelConfig
    layout: Layout
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens in a microbatch."""
        return self.layout.microbatch_size * self.seq_len


@dataclass(frozen=True)
class Run(Work):
    """Work on a cluster. The time of a microbatch depends only on this."""

    cluster: Cluster
    constants: Constants = field(default_factory=Constants)

    def speed(self, itemsize: int) -> float:
        """Return the operations a second that large products of such elements reach on one GPU."""
        return self.cluster.gpu.peak_of(itemsize) * self.constants.matmul_efficiency
