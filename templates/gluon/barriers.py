"""Who waits for whom in a CTA of the Gluon kernel: its warps, its named barriers, and channels between its partitions."""

from enum import IntEnum

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate  # gluon.aggregate from Triton 3.8 on

from ..tiles import GLUON_CONSUMERS, GLUON_PARTITIONS

PARTITIONS = gl.constexpr(GLUON_PARTITIONS)
WARPS = gl.constexpr(GLUON_CONSUMERS)  # that multiply; each other partition is one warp
THREADS = gl.constexpr(32 * GLUON_CONSUMERS)  # of those
WARPGROUP = gl.constexpr(128)  # threads that issue a wgmma together

# At head dim 256 there is shared memory for one stage less of Q and of grad_out.
Q_STAGES, DO_STAGES, DQ_STAGES = gl.constexpr(3), gl.constexpr(2), gl.constexpr(2)


class NamedBarrier(IntEnum):
    """The named barrier of a channel's first stage; those of its other stages follow.

    The eight warps arrive at each and go on, and one warp waits there. Triton takes 0 for the CTA or a partition, and 1 and those
    after it for partitions, of which there are at most five.
    """

    KV_READ = 7  # produce waits: TMA has read dK and dV from K's and V's memory, through which they go at head dim 256
    DQ_STORED = 8  # add_in_order waits: a step's dQ is in shared memory; at head dim 256 a half, of which each has its own
    STEP_READ = 10  # produce waits: a step's matmuls are complete, so Q's stage is free
    DO_READ = 13  # produce waits: the matmuls that read grad_out are complete, so its stage is free
    SHARE_STORED = 15  # put_shares waits: those of a step, or of a part of its queries, are in shared memory


# The same for Triton's functions, which read global constants alone.
KV_READ, DQ_STORED, STEP_READ, DO_READ, SHARE_STORED = (gl.constexpr(first.value) for first in NamedBarrier)

BOTH_ENDS = 32 * (GLUON_CONSUMERS + 1)  # threads of a named barrier: the eight warps', and those of the warp that waits
ARRIVE = gl.constexpr(f"bar.arrive $1, {BOTH_ENDS}; mov.b32 $0, 0;")
MEET = gl.constexpr(f"bar.sync $1, {BOTH_ENDS}; mov.b32 $0, 0;")


@gluon.jit
def at_barrier(HOW: gl.constexpr, number):
    gl.inline_asm_elementwise(HOW, "=r,r,~{memory}", [number], dtype=gl.int32, is_pure=False, pack=1)


@aggregate
class Channel:
    """Stages of shared memory between the eight warps that multiply and one warp, which take turns at each.

    The one warp, or TMA for it, arrives at an mbarrier and the eight wait there; they arrive at a named barrier and it waits there.
    A step takes the stage and the phase of `count`: how many steps of all chains were before it.

    mbarriers: int64 [STAGES, 1]. NAMED: the named barrier of the first stage.
    """

    mbarriers: gl.shared_memory_descriptor
    NAMED: gl.constexpr
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, mbarriers, NAMED, STAGES):
        self.mbarriers = mbarriers
        self.NAMED = gl.constexpr(NAMED)
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def init(self):
        for stage in gl.static_range(self.STAGES):
            mbarrier.init(self.mbarriers.index(stage), count=1)

    @gluon.jit
    def stage(self, count):
        return count % self.STAGES

    @gluon.jit
    def mbarrier(self, count):
        return self.mbarriers.index(count % self.STAGES)

    @gluon.jit
    def wait(self, count):
        # For the eight warps: what the one warp does in this step.
        mbarrier.wait(self.mbarrier(count), (count // self.STAGES) % 2)

    @gluon.jit
    def wait_for_stage(self, count):
        # For the eight warps: what it did in the step that had this stage before. Returns at once where there is none.
        mbarrier.wait(self.mbarrier(count), (count // self.STAGES + 1) % 2)

    @gluon.jit
    def arrive(self, count):
        # For the eight warps, which go on.
        at_barrier(ARRIVE, count % self.STAGES + self.NAMED)

    @gluon.jit
    def meet(self, count):
        # For the one warp: waits for the eight.
        at_barrier(MEET, count % self.STAGES + self.NAMED)

    @gluon.jit
    def meet_before(self, count, step):
        # The same for the step that had this stage before, if the chain had one.
        if step >= self.STAGES:
            self.meet(count)

    @gluon.jit
    def meet_last(self, count, steps):
        # At the end of a chain of `steps` steps: for those that `meet_before` left.
        left = gl.minimum(steps, self.STAGES)
        for step in range(left):
            self.meet(count - left + step)


@gluon.jit
def new_channel(NAMED: gl.constexpr, STAGES: gl.constexpr):
    return Channel(gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()), NAMED, STAGES)
