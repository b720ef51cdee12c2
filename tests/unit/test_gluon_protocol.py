"""The Gluon kernel's source, run on the CPU by gluon_model: right gradients, the same bits in every interleaving, mutants seen."""

import functools
import random
import re
from dataclasses import replace
from importlib import resources

import gluon_model
import pytest
import torch
from gluon_model import Deadlock, module_of, words_and_bits
from schedule.walks import Walks, Work
from sympy import Integer

from dash_inductor.lowering.dq import in_accumulator_order
from dash_inductor.reference import LOG2E, reference
from dash_inductor.schedule import Geometry, RoundRobinPlan, pack_plan, place_heads
from dash_inductor.schedule.packing import may_share_row, pack_shared
from dash_inductor.schedule.parts import WHOLE, Parts
from dash_inductor.templates.tiles import gluon_tile

WIDE = "gluon/wide"  # what multiplies at head dim 256
BLOCK = 128  # rows and keys of a block of a mask
LEAST_STEPS = 4  # of a chain, for bands
REPORT = torch.zeros(4, dtype=torch.int32)


def tile_of(head_dim):
    return gluon_tile(90, "bf16", head_dim)


def sources() -> dict[str, str]:
    """Of the functions, the kernel and its launch, in an order in which they make one module."""
    folder = resources.files("dash_inductor.templates")
    parts = "positions", "gluon/barriers", "gluon/functions", "gluon/walk", "gluon/add", WIDE, "gluon/kernel", "gluon/launch"
    names = "|".join(part.removeprefix("gluon/") for part in parts)
    imports = rf"from \.+({names}) import (\([^)]*\)|.*)\n"
    texts = {part: re.sub(imports, "", folder.joinpath(f"{part}.py").read_text()) for part in parts}
    return {part: text.replace("from ..tiles ", "from dash_inductor.templates.tiles ") for part, text in texts.items()}


def source() -> str:
    return "\n\n".join(sources().values())


@functools.cache
def accumulator_order(head_dim: int) -> torch.Tensor:
    """Where the epilogue looks for element (m, d) of a Q tile."""
    place = in_accumulator_order(tile_of(head_dim))
    rows = range(tile_of(head_dim).block_m)
    return torch.tensor([[int(place(Integer(m), Integer(d))[0]) for d in range(head_dim)] for m in rows])


def attention(batch, kv_heads, group, q_len, kv_len, seen, head_dim, shift=0):
    """query, key, value, grad_out, out, logsumexp under the mask `seen`, [B, H, S, D] views of [B, S, H, D] in bf16. shift: of the
    elements of query, and of key the other way."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads, length):
        return torch.randn(batch, length, heads, head_dim, generator=generator).to(torch.bfloat16).transpose(1, 2)

    query, grad_out = normal(kv_heads * group, q_len), normal(kv_heads * group, q_len)
    key, value = normal(kv_heads, kv_len), normal(kv_heads, kv_len)
    query, key = query + shift, key - shift
    scores = query.float() @ key.float().repeat_interleave(group, 1).mT * head_dim**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    out = (scores.softmax(-1) @ value.float().repeat_interleave(group, 1)).to(torch.bfloat16)
    return query, key, value, grad_out, out, scores.logsumexp(-1)


def padded(x, rows, value):
    """x [B, H, S] with `rows` rows, the new ones `value`."""
    return torch.nn.functional.pad(x, (0, rows - x.shape[2]), value=value)


def lists_of(seen, block_m, block_n, parts=WHOLE):
    """(rows, steps, bits) of a mask [S_q, S_k] in blocks of 128, as the kernels before the launch write them."""
    q_len, kv_len = seen.shape
    n_q, n_kv = -(-q_len // block_m), -(-kv_len // block_n)
    blocks = [[seen[i : i + BLOCK, j : j + BLOCK] for i in range(0, q_len, BLOCK)] for j in range(0, kv_len, BLOCK)]
    sees = [[bool(block.any()) for block in row] for row in blocks]
    walks = Walks([[sees]], 1, 1, 1, n_q, n_kv, BLOCK // block_m, BLOCK // block_n, parts)
    rows = table_of(walks)
    for j, row in enumerate(walks.lists(sees)):
        for place, (i, _rank) in enumerate(row):
            rows[0, 0, j, place] |= blocks[j][i].all() << 15
    steps = torch.tensor([[walks.steps(sees)]], dtype=torch.int32)
    n, m = torch.arange(n_kv * block_n)[:, None], torch.arange(n_q * block_m)
    thread, bit = words_and_bits(n % block_n, m % 64)
    inside = torch.nn.functional.pad(seen.T, (0, n_q * block_m - q_len, 0, n_kv * block_n - kv_len))
    words = torch.zeros(n_kv, n_q * block_m // 64, 2 * block_n, dtype=torch.int64)
    words.index_put_((n // block_n, m // 64, thread), inside.long() << bit, accumulate=True)
    return rows, steps if parts.bands > 1 else steps[..., 0], words.to(torch.int32)


def table_of(walks):
    """Rows of the masks [MASK_Z, MASK_H, KV blocks, Q blocks], as block_rows.py.jinja writes them where no block is full."""
    masks = [[walks.lists(mask) for mask in of_batch] for of_batch in walks.masks]
    n_blocks = len(walks.masks[0][0][0])
    padded = [[[[i | rank << 16 for i, rank in row] + [-1] * (n_blocks - len(row)) for row in rows] for rows in x] for x in masks]
    return torch.tensor(padded, dtype=torch.int32)


def backward(module, inputs, plan, seed, seen=None, shared_row=False):
    """(dq, dk, dv) in fp32, dtype, dtype of one launch, by a plan or, in `Parts`, under the mask `seen`. What it does not write is
    NaN."""
    query, key, value, grad_out, out, lse = inputs
    batch, heads, q_len, head_dim = query.shape
    tile = tile_of(head_dim)
    rows = -(-q_len // tile.block_m) * tile.block_m
    neg_lse = padded(-lse * LOG2E, rows, -torch.inf).contiguous()
    delta = padded((out.float() * grad_out.float()).sum(-1), rows, 0.0).contiguous()
    dq = torch.full((batch, heads, rows, head_dim), torch.nan)
    dk, dv = torch.empty_like(key).fill_(torch.nan), torch.empty_like(value).fill_(torch.nan)
    sizes = {"block_m": tile.block_m, "block_n": tile.block_n}
    if isinstance(plan, Parts):
        table, steps, bits = lists_of(seen, **sizes, parts=plan)
        n_kv, kv_tiles = -(-key.shape[2] // tile.block_n), BLOCK // tile.block_n
        workers = plan.units(batch * key.shape[1], n_kv, kv_tiles)
        sums = torch.full((batch * key.shape[1] * n_kv * 2 * tile.block_n * head_dim,), torch.nan)
        lists = module.Lists(steps, bits, BLOCK // tile.block_m, kv_tiles, plan.bands, plan.sets, 16, LEAST_STEPS, sums)
        how = {"lists": lists, "causal": False, "shared_row": False, "round_robin": False}
    else:
        table = torch.tensor((pack_shared if shared_row else pack_plan)(plan), dtype=torch.int32)
        how = {"causal": plan.order.geometry.mask != "full", "round_robin": isinstance(plan, RoundRobinPlan)}
        how["shared_row"] = shared_row
        workers = plan.workers + (not how["round_robin"])  # one too many
    tensors = (query, key, value, grad_out, neg_lse, delta, table, dq, dk, dv)
    arguments = module.arguments(*tensors, report=REPORT, workers=workers, scale=head_dim**-0.5, **sizes, **how)
    gluon_model.launch(module.sdpa_backward, seed, workers, arguments)
    dq = dq.view(batch, heads, -1, tile.block_m * head_dim)[..., accumulator_order(head_dim)].flatten(2, 3)
    return dq[:, :, :q_len] * head_dim**-0.5, dk, dv


CASES = [
    # batch, kv heads, group, q_len, kv_len, mask, family, roles, heads in flight, head dim: 64 in two parts of a step, 128 in one,
    # 256 by warps of its own
    (1, 2, 1, 384, 384, "full", "shift", 3, 2, 64),
    (2, 2, 1, 320, 512, "full", "ascending", 2, 3, 64),
    (1, 1, 2, 165, 293, "full", "descending", 3, 1, 128),
    (2, 1, 3, 192, 192, "causal", "descending", 2, 1, 64),
    (1, 3, 1, 357, 357, "causal", "symmetric", 1, 2, 128),
    (1, 2, 2, 485, 485, "causal", "ascending", 4, 2, 64),
    (3, 1, 1, 37, 37, "causal", "descending", 1, 1, 128),
    (1, 3, 1, 320, 475, "full", "shift_round_robin", 3, 1, 128),
    (2, 1, 2, 357, 357, "causal", "symmetric_round_robin", 3, 1, 64),
    (1, 3, 1, 640, 640, "causal", "symmetric_round_robin", 2, 1, 128),
    (1, 1, 2, 165, 200, "full", "ascending", 2, 1, 256),
    (1, 2, 1, 192, 192, "full", "shift", 3, 2, 256),
    (2, 1, 1, 229, 229, "causal", "symmetric", 1, 2, 256),
    (1, 3, 1, 150, 270, "full", "shift_round_robin", 3, 1, 256),
    (1, 3, 1, 320, 320, "causal", "symmetric_round_robin", 2, 1, 256),
]


def problem(batch, kv_heads, group, q_len, kv_len, mask, family, roles, heads_in_flight, head_dim):
    """Inputs and plan of a case."""
    geometry = Geometry(q_len, kv_len, tile_of(head_dim).block_m, tile_of(head_dim).block_n, mask)
    how = {"heads": batch * kv_heads, "heads_in_flight": heads_in_flight, "group": group}
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    seen = seen if mask == "full" else seen.tril()
    return attention(batch, kv_heads, group, q_len, kv_len, seen, head_dim), place_heads(family, geometry, roles, **how)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small, and waking a second thread takes milliseconds on busy cores
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_gradients_and_bits(case):
    inputs, plan = problem(*case)
    module = module_of(source())
    first, *others = (backward(module, inputs, plan, seed) for seed in range(6))
    query, key, value, grad_out, out, lse = inputs
    expected = reference(grad_out, query, key, value, out, lse, plan.order)
    for name, grad, right in zip(("dq", "dk", "dv"), first, expected, strict=True):
        error = (grad.double() - right.double()).abs().max() / right.double().abs().max()
        assert error < 2**-8, f"{name} is {error} of the largest element off"
    for other in others:
        assert all(map(torch.equal, first, other))


MASKS = {
    "documents": lambda m, n: (m >= n) & (m // 150 == n // 150),
    "window": lambda m, n: (m - n).abs() < 40,
    "checks": lambda m, n: (m // 3 + n // 5) % 2 == 0,
    "later keys": lambda m, n: n >= m,
    "causal": lambda m, n: m >= n,
    "first keys": lambda m, n: (m >= n) & (n < BLOCK),
}
IN_BLOCKS = [
    # batch, kv heads, group, q_len, kv_len, mask, head dim
    (1, 2, 1, 384, 384, "documents", 64),
    (2, 1, 2, 300, 300, "documents", 128),
    (1, 1, 1, 390, 390, "window", 128),
    (1, 2, 1, 200, 300, "checks", 64),
    (1, 1, 2, 330, 500, "later keys", 64),
    (1, 1, 2, 200, 300, "checks", 256),
    (2, 1, 1, 300, 300, "documents", 256),
]


IN_PARTS = {
    (1, 2, 1, 520, 520, "causal", 64): Parts(bands=4),  # four bands of five KV tiles
    (1, 1, 4, 300, 300, "causal", 128): Parts(bands=4, sets=2),
    (1, 1, 4, 200, 300, "first keys", 64): Parts(sets=4),  # and a KV tile that no query sees
    (2, 1, 2, 390, 390, "documents", 128): Parts(bands=2, sets=1),
    (1, 1, 2, 260, 260, "causal", 256): Parts(bands=2, sets=2),
    (1, 1, 1, 200, 200, "causal", 64): Parts(bands=4),  # too short for bands
}


def in_blocks(batch, kv_heads, group, q_len, kv_len, mask, head_dim, shift=0):
    """Inputs and mask of a case."""
    seen = MASKS[mask](torch.arange(q_len)[:, None], torch.arange(kv_len))
    return attention(batch, kv_heads, group, q_len, kv_len, seen, head_dim, shift), seen


@pytest.mark.parametrize("case", IN_BLOCKS, ids=lambda case: "-".join(map(str, case)))
def test_masks_in_blocks(case):
    assert_right(*in_blocks(*case), WHOLE)


@pytest.mark.parametrize(("case", "parts"), IN_PARTS.items(), ids=lambda x: "-".join(map(str, x)) if isinstance(x, tuple) else "")
def test_chains_in_parts(case, parts):
    assert_right(*in_blocks(*case), parts)


def assert_right(inputs, seen, parts):
    """The gradients, and the same bits in each interleaving."""
    query, key, value, grad_out, *_ = inputs
    module = module_of(source())
    first, *others = (backward(module, inputs, parts, seed, seen) for seed in range(4))
    leaves = [x.double().requires_grad_() for x in (query, key, value)]
    group = query.shape[1] // key.shape[1]
    q, k, v = leaves[0], *(x.repeat_interleave(group, 1) for x in leaves[1:])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    for grad, right in zip(first, torch.autograd.grad(out, leaves, grad_out.double()), strict=True):
        assert (grad.double() - right).abs().max() < 2**-7 * right.abs().max()
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("case", [case for case in CASES if may_share_row(problem(*case)[1])], ids=str)
def test_one_row_for_all_chains(case):
    """As where sequences are long: the same bits."""
    inputs, plan = problem(*case)
    module = module_of(source())
    of_rows, of_row = (backward(module, inputs, plan, seed=1, shared_row=shared) for shared in (False, True))
    assert all(map(torch.equal, of_rows, of_row))


def test_more_heads_in_flight_than_there_are():
    """Workers without a head, and an empty chain for which zeros are written."""
    inputs, plan = problem(1, 1, 1, 64, 320, "full", "ascending", 3, 1, 128)
    for grad in backward(module_of(source()), inputs, replace(plan, heads=4, heads_in_flight=4), 0):
        assert grad.isfinite().all()


def random_walks(seed):
    """Masks, sizes and parts at random; query heads with masks of their own are a set each."""
    draw = random.Random(seed)
    batch, kv_heads, sets, size = (draw.randint(1, 2) for _ in range(4))
    n_q, n_kv, q_tiles, kv_tiles = (draw.randint(1, most) for most in (9, 9, 3, 3))
    n_masks = draw.choice([1, batch]), draw.choice([1, kv_heads * sets]) if size == 1 else 1
    seen = draw.random()

    def mask():
        return [[draw.random() < seen for _ in range(0, n_q, q_tiles)] for _ in range(0, n_kv, kv_tiles)]

    masks = [[mask() for _ in range(n_masks[1])] for _ in range(n_masks[0])]
    parts = Parts(draw.choice([1, 2, 4]), sets)
    sizes = (batch, kv_heads, sets * size, n_q, n_kv, q_tiles, kv_tiles)
    return Walks(masks, *sizes, parts, least_steps=draw.randint(0, 12), by_head=parts.bands == 1)


def walked(module, expected):
    """The same by the kernel's own functions, ticket by ticket."""
    block_n, group, parts = 64, expected.group, expected.parts
    table = table_of(expected)
    steps = torch.tensor([[expected.steps(mask) for mask in of_batch] for of_batch in expected.masks], dtype=torch.int32)
    most_chains = len(expected.masks[0][0])
    kv_heads = expected.batch * expected.kv_heads
    sizes = (kv_heads, expected.kv_heads, expected.n_q, expected.n_kv * block_n - 1)
    attention = module.Attention(*sizes, group, parts.sets, False, False, 0, expected.q_tiles, False, 1.0, 1.0)
    lists = module.Lists(
        steps, None, expected.q_tiles, expected.kv_tiles, parts.bands, parts.sets, most_chains, expected.least_steps
    )
    of_mask = *map(gluon_model.pointer, (table, lists)), (*table.shape, parts.bands)
    for ticket in range(parts.units(kv_heads, expected.n_kv, expected.kv_tiles)):
        found = module.chain_in_lists(*of_mask, ticket, attention, block_n)
        (j, turns, row, rows, head, of_set, first_rank), _mask, of_chain, place = found
        heads = group // parts.sets
        entries = [module.step_of(rows + row, turn, expected.q_tiles) for turn in range(turns)]
        walk = [(head * group + of_set * heads + n, i & 0xFFFF, rank + first_rank) for i, rank in entries for n in range(heads)]
        yield Work(head, j, tuple(walk), place, of_chain) if j >= 0 else None


def test_who_walks_which_steps():
    """Under masks in blocks; tests/emulated/test_flex_parts.py holds the Triton kernel against the same oracle."""
    module = module_of(source())
    for expected in map(random_walks, range(100)):
        assert list(walked(module, expected)) == expected.works()


def test_tensors_that_tma_cannot_take_are_copied():
    (query, key, value, grad_out, *rest), plan = problem(*CASES[0])
    odd = torch.nn.functional.pad(key, (0, 1))[..., :-1]  # rows at odd multiples of 2 bytes
    backwards = value.mT.contiguous().mT
    ones = torch.ones((), dtype=grad_out.dtype)
    for inputs, copies in (
        ((odd, backwards, grad_out), (key, value, grad_out)),
        ((key, value, ones.expand_as(grad_out)), (key, value, torch.ones_like(grad_out))),
    ):
        copied, right = (backward(module_of(source()), (query, *tensors, *rest), plan, 0) for tensors in (inputs, copies))
        assert all(map(torch.equal, copied, right))


def test_tensors_of_another_size_are_refused():
    (query, key, value, grad_out, _, lse), _ = problem(*CASES[0])
    tensors = (query, key, value, grad_out, lse, lse[:1, :1], torch.zeros(8, dtype=torch.int32), query.float(), key, value)
    with pytest.raises(ValueError, match="contiguous, with 768 rows"):
        sizes = {"block_m": 128, "block_n": 128, "workers": 1}
        module_of(source()).arguments(*tensors, report=REPORT, **sizes, causal=False, shared_row=False, round_robin=False, scale=1)


# What a warp does that adds dQ, line by line.
RANK = "                wait_for_rank(SEMAPHORES, index, rank, attention.nq, REPORT)\n"
SEEN = "                of_dq.meet(STAGE)\n"
PUT = "                put(dq_target, index, dq_tiles.index(STAGE), rank)\n"
READ = "                await_all_read()\n"
TAKEN = "                mbarrier.arrive(of_dq.mbarrier(STAGE), count=1)\n"
ADDED = "                await_additions()\n"
RELEASE = "                release(SEMAPHORES + index)\n"
LAST = "dk = await_matmuls(0, deps=[dk])"
DQ_STORE = "dq_tiles.index(of_dq.stage(count)).store(in_accumulator_order(dq, dq_tiles.shape[2]))\n"
DV_DONE = "dq, dv = await_matmuls(1, deps=[dq, dv])"
WAIT_FOR_Q = "                of_q.meet_before(count, step)\n"
WAIT_FOR_DO = "                of_do.meet_before(count, step)\n"
Q_LOADED, DO_LOADED = "arrived, neg_lse_tiles.index(stage))\n", "arrived, delta_tiles.index(stage))\n"
REST_OF_DO = "            of_do.meet_last(count, steps)\n"
REST_OF_Q = "            of_q.meet_last(count, steps)\n"
REST = REST_OF_DO + REST_OF_Q  # of a chain
PHASE, PHASE_BEFORE = "(count // self.STAGES) % 2", "(count // self.STAGES + 1) % 2"
BARRIER = "barrier()  # all warps have waited for the matmul that reads the last step's\n"
MUTANTS = {
    "no wait for the rank": [(RANK, "")],
    "a step released before it is added": [(ADDED + RELEASE, RELEASE + ADDED)],
    "additions never awaited": [(ADDED, "")],
    "dq added before it is stored": [(SEEN + PUT, PUT + SEEN)],
    "dq taken before it is seen": [(TAKEN, ""), (SEEN, TAKEN + SEEN)],
    "dq taken before TMA has read it": [(READ + TAKEN, TAKEN + READ)],
    "dq never taken": [(TAKEN, "")],
    "the other place taken": [("of_dq.mbarrier(STAGE)", "of_dq.mbarrier(1 - STAGE)")],
    "dq stored over one in use": [("of_dq.wait_for_stage(count)", "pass")],
    "wrong phase of what was taken": [(PHASE_BEFORE, PHASE)],
    "one place for dq": [("dq_tiles.index(STAGE)", "dq_tiles.index(0)")],
    "dq of the other place awaited": [("of_dq.meet(STAGE)", "of_dq.meet(1 - STAGE)")],
    "steps of the other place": [("if of_dq.stage(count) == STAGE:", "if of_dq.stage(count) != STAGE:")],
    "steps of both places": [("if of_dq.stage(count) == STAGE:", "if True:")],
    "two warps of one place": [("(also_added, attention, adding, 1)", "(also_added, attention, adding, 0)")],
    "no fence behind dq": [(f"{DQ_STORE}                    fence_async_shared()", DQ_STORE)],
    "dq said to be stored too early": [
        (DQ_STORE, f"of_dq.arrive(count)\n                    {DQ_STORE}"),
        ("()\n                    of_dq.arrive(count)\n", "()\n"),
    ],
    "dq said to be in the other place": [("of_dq.arrive(count)", "of_dq.arrive(count + 1)")],
    "a stage free before its last matmul": [
        (f"{LAST}\n                    of_q.arrive(count)", f"of_q.arrive(count)\n                    {LAST}")
    ],
    "grad_out free before its last matmul": [
        (f"{DV_DONE}\n                    of_do.arrive(count)", f"of_do.arrive(count)\n                    {DV_DONE}")
    ],
    "the first adds": [("if rank == 0:", "if rank < 0:")],
    "the others store": [("if rank == 0:", "if rank >= 0:")],
    "another order of dq's elements": [("permute([4, 3, 0, 2, 5, 1, 6])", "permute([4, 3, 0, 5, 2, 1, 6])")],
    "Q over a stage in use": [(WAIT_FOR_Q, ""), (Q_LOADED, Q_LOADED + WAIT_FOR_Q)],
    "grad_out over a stage in use": [(WAIT_FOR_DO, ""), (DO_LOADED, DO_LOADED + WAIT_FOR_DO)],
    "K and V over a tile in use": [
        (REST, "            before = steps\n"),
        ("    of_q, of_do, kv_full = channels\n", "    of_q, of_do, kv_full = channels\n    before = 0\n"),
        ("kv_full, v_tile)\n", f"kv_full, v_tile)\n{REST.replace('steps', 'before')}"),
    ],
    "the end of Q's stages never awaited": [(REST_OF_Q, "")],
    "the end of grad_out's stages never awaited": [(REST_OF_DO, "")],
    "the end of other stages awaited": [(REST_OF_Q, REST_OF_Q.replace("count", "count + 1"))],
    "K and V before they have arrived": [("mbarrier.wait(kv_full, kv_phase)", "pass")],
    "Q before it has arrived": [("of_q.wait(count)", "pass")],
    "grad_out before it has arrived": [("of_do.wait(count)", "pass")],
    "wrong phase of the ring": [(PHASE, PHASE.replace("STAGES", "STAGES + 1"))],
    "the phase of a ring of two stages": [(PHASE, PHASE.replace("self.STAGES", "2"))],
    "Q loaded into two stages": [(" stage = of_q.stage(count)\n", " stage = count % 2\n")],
    "Q read from two stages": [("q_stage = of_q.stage(count)", "q_stage = count % 2")],
    "lse of grad_out's stage": [("neg_lse_tiles.index(q_stage)", "neg_lse_tiles.index(stage)")],
    "grad_out's stage free for Q": [("of_q.arrive(count)", "of_q.arrive(stage)")],
    "bytes that are not counted": [
        (
            "arrived = of_q.mbarrier(count)\n                mbarrier.expect(arrived, BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4)",
            "arrived = of_q.mbarrier(count)\n                mbarrier.expect(arrived, BLOCK_M * HEAD_DIM * 2)",
        )
    ],
    "no fence before the dq matmul": [("fence_async_shared()\n                    barrier()\n", "barrier()\n")],
    "no barrier before the dq matmul": [("barrier()\n                    # (4)", "# (4)")],
    "no barrier behind the dq matmul": [(BARRIER, "pass\n")],
    "dq used before its matmul is done": [("await_matmuls(1, deps=[dq, dv])", "await_matmuls(2, deps=[dq, dv])")],
    "an entry past the chain": [("gl.minimum(step + 1, steps - 1)", "(step + 2)")],
    "S of the second part used before its matmul is done": [
        ("await_matmuls(3, deps=[next_s_t])", "await_matmuls(4, deps=[next_s_t])")
    ],
    "dP of the second part used before its matmul is done": [("await_matmuls(2, deps=[dp_t])", "await_matmuls(3, deps=[dp_t])")],
    "lse of the first part for the second": [("row_of(neg_lse, PART,", "row_of(neg_lse, 0,")],
    "delta of the first part for the second": [("row_of(delta, PART,", "row_of(delta, 0,")],
    "edges not masked": [("if first_key + s_t.shape[0] > first_row + 1:", "if False:")],
    "edges of the second part as those of the first": [("i * BLOCK_M + PART", "i * BLOCK_M")],
    "heads of a group mixed up": [
        (
            "hq = h * attention.GROUP + of_set * HEADS + step % HEADS",
            "hq = h * attention.GROUP + of_set * HEADS + (step + 1) % HEADS",
        )
    ],
}

MUTANTS_IN_A_QUEUE = {
    "the row of another partition": [("(TABLE, ROWS + 2 * attention.nq, own_role", "(TABLE, ROWS, own_role")],
    "one row for both warps that add": [("(TABLE, ROWS + 3 * attention.nq, own_role", "(TABLE, ROWS + 2 * attention.nq, own_role")],
    "the row of another worker": [("ROWS += ticket * PARTITIONS * attention.nq", "ROWS += 0 * ticket")],
    "a chain of a head that begins with the round": [("begin -= head * queue", "begin -= begin")],
    "small chains as long as big ones": [("steps -= j * RATIO", "steps -= 0")],
    "turns of whole heads": [("rounds = gl.cdiv(attention.heads * queue - own_role, roles) * slots", "pass")],
    "places of dq counted anew in each chain": [
        ("steps * HEADS):\n            if of_dq", "steps * HEADS):\n            count *= step > 0\n            if of_dq")
    ],
}
MUTANTS_IN_BLOCKS = {
    "a rank of the KV tile after": [("* KV_TILES) - 1 - j % KV_TILES", "* KV_TILES) - j % KV_TILES")],
    "the first Q tile of a block twice": [("* BLOCKS + turn % BLOCKS +", "* BLOCKS + 0 * turn +")],
    "hidden elements of full blocks alone": [("(~entry & 0x8000) << 1", "(entry & 0x8000) << 1")],
    "the ragged end seen": [("hidden = hidden | ((j + 1) * BLOCK_N > attention.kv_len)", "pass")],
    "bits of another Q tile": [("load_bits(BITS + (first_word + i * (THREADS * PARTS)))", "load_bits(BITS + first_word)")],
    "bits of another KV tile": [("(mask * n_kv + chain[0]) * attention.nq", "(mask * n_kv + 0) * attention.nq")],
}
HALVES_ADDED, HALVES_TAKEN = "await_additions()\n            ", "mbarrier.arrive(taken, count=1)\n            "
THIRD = "put(dq_target, 4 * index + 2, third_tile, rank)\n            "
MUTANTS_OF_256 = {
    "no wait for the rank": [(f"{RANK.strip()}\n            of_dq.meet(0)", "of_dq.meet(0)")],
    "a step released before all of it is added": [
        (f"{HALVES_ADDED}{HALVES_TAKEN}{RELEASE.strip()}", f"{RELEASE.strip()}\n            {HALVES_ADDED}{HALVES_TAKEN}")
    ],
    "the place of the first part taken before it is read": [("await_all_but_last_read()\n", "pass\n")],
    "places taken before the second half is read": [(HALVES_ADDED + HALVES_TAKEN, HALVES_TAKEN + HALVES_ADDED)],
    "the second half added before it is stored": [(f"of_dq.meet(0)\n            {THIRD}", f"{THIRD}of_dq.meet(0)\n            ")],
    "the first half stored over one in use": [("of_dq.wait_for_stage(0)", "pass")],
    "the second half stored over the first": [("of_dq.wait_for_stage(1)", "pass")],
    "parts of the second half mixed up": [("dq_tiles[2], dq_tiles[0], of_dq)", "dq_tiles[0], dq_tiles[2], of_dq)")],
    "one half of K for both": [("k.slice(HALF, HALF, dim=1)", "k.slice(0, HALF, dim=1)")],
    "no fence behind dq": [("second_tile.store(second)\n    fence_async_shared()\n", "second_tile.store(second)\n")],
    "grad_out free before its last matmul": [
        (f"{DV_DONE}\n                    of_do.arrive(count)", f"of_do.arrive(count)\n                    {DV_DONE}")
    ],
    "grad_out over one in use": [(WAIT_FOR_DO, ""), (DO_LOADED, DO_LOADED + WAIT_FOR_DO)],
    "the end of grad_out never awaited": [(REST_OF_DO, "")],
    "grad_out before it has arrived": [("of_do.wait(count)", "pass")],
    "wrong phase of grad_out": [("of_do.wait(count)", "of_do.wait(1)")],
    "a stage free before its last matmul": [
        (
            "dq, dk = await_matmuls(0, deps=[dq, dk])\n",
            "of_q.arrive(count)\n                    dq, dk = await_matmuls(0, deps=[dq, dk])\n",
        ),
        ("dq_tiles[0], of_dq)\n                    of_q.arrive(count)\n", "dq_tiles[0], of_dq)\n"),
    ],
    # The end of grad_out orders as much, and Triton would put a barrier there: the model sees neither.
    "no barrier behind the dv matmul": [("barrier()  # between stores to the first place", "pass  #")],
    "no fence behind P": [
        ("p_tile.store(p_t.to(dtype))\n                    fence_async_shared()\n", "p_tile.store(p_t.to(dtype))\n")
    ],
    "no barrier before the dv matmul": [("barrier()\n                    # (3)", "# (3)")],
    "no barrier before the dq matmul": [("barrier()\n                    # (4)", "# (4)")],
    "S used before its matmul is done": [("await_matmuls(1, deps=[s_t])", "await_matmuls(2, deps=[s_t])")],
    "dP used before its matmul is done": [("await_matmuls(1, deps=[dp_t])", "await_matmuls(2, deps=[dp_t])")],
    "dq used before its matmul is done": [("await_matmuls(1, deps=[dq, dv])", "await_matmuls(2, deps=[dq, dv])")],
    "dk's matmul left in flight": [("await_matmuls(0, deps=[dq, dk])", "await_matmuls(1, deps=[dq, dk])")],
    "an entry past the chain": [("gl.minimum(step + 1, steps - 1)", "(step + 2)")],
}
MUTANTS_OF_256_IN_BLOCKS = {
    "bits of the other half of the queries": [("% WARPGROUP) + thread() // WARPGROUP", "% WARPGROUP) + 1 - thread() // WARPGROUP")],
    "bits of another Q tile": [("(first_bits + i * (BLOCK_M * BLOCK_N // 16))", "first_bits")],
    "bits of another KV tile": [("(mask * n_kv + chain[0]) * attention.nq", "(mask * n_kv + 0) * attention.nq")],
    "a rank of the KV tile after": [("* KV_TILES) - 1 - j % KV_TILES", "* KV_TILES) - j % KV_TILES")],
    "the same rank for both KV tiles of a block": [("* KV_TILES) - 1 - j % KV_TILES", "* KV_TILES) - 1")],
    "the ragged end seen": [("hidden = hidden | ((j + 1) * BLOCK_N > attention.kv_len)", "pass")],
}
WHOLE_HEADS = 1, 1, 2, 320, 320, "causal", "descending", 2, 1, 64
MUTANTS_IN_PARTS = {
    "no wait for the part before": [("wait_for_rank(SEMAPHORES, chain, place * WARPS, -attention.nq, REPORT)", "pass")],
    "each part the first": [("if place > 0:", "if False:")],
    "each part the last": [("is_last = place == parts - 1", "is_last = True")],
    "a part released before it is added": [
        ("            release_by_warps(SEMAPHORES + chain)\n", ""),
        ("            if place > 0:\n", "            release_by_warps(SEMAPHORES + chain)\n            if place > 0:\n"),
    ],
    "the sums of another head": [("chain = head * gl.cdiv(attention.kv_len, BLOCK_N) + j", "chain = j")],
    "bands that begin with the chain": [("                    first = begin\n", "")],
    "bands that end with the chain": [("steps = end - begin", "steps = steps - begin")],
    "a set of other query heads": [("hq = h * attention.GROUP + of_set * HEADS", "hq = h * attention.GROUP + 0 * HEADS")],
    "parts of whom no band has a step": [("if end > begin:", "if end >= begin:")],
}
OF_256 = 1, 1, 2, 160, 160, "causal", "descending", 2, 1, 256
IN_A_QUEUE = 1, 3, 1, 640, 640, "causal", "symmetric_round_robin", 2, 1, 64


def assert_seen(module, inputs, plan, seen=None):
    """Some interleaving gives other bits than the kernel does, or none."""
    right = backward(module_of(source()), inputs, plan, 0, seen)
    for seed in range(20):
        try:
            if not all(map(torch.equal, backward(module, inputs, plan, seed, seen), right)):
                return
        except (AssertionError, Deadlock):
            return
    raise AssertionError("no interleaving shows the mutant")


def mutant(changes, head_dim=64):
    """Changes are to what stands once in the sources of a head dim; of 256 in its own, or else in what is common."""
    texts = sources()
    for before, after in changes:
        (name,) = [WIDE] if head_dim == 256 and before in texts[WIDE] else [x for x in texts if x != WIDE and before in texts[x]]
        assert texts[name].count(before) == 1
        texts[name] = texts[name].replace(before, after)
    return module_of("\n\n".join(texts.values()))


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_seen(name):
    assert_seen(mutant(MUTANTS[name]), *problem(*WHOLE_HEADS))


@pytest.mark.parametrize("name", MUTANTS_IN_A_QUEUE)
def test_mutants_of_a_round_robin_are_seen(name):
    assert_seen(mutant(MUTANTS_IN_A_QUEUE[name]), *problem(*IN_A_QUEUE))


@pytest.mark.parametrize("name", MUTANTS_IN_BLOCKS)
def test_mutants_in_blocks_are_seen(name):
    # Of scores so far below 0 that a key past the end, whose score is 0, would have an infinite probability.
    inputs, seen = in_blocks(1, 1, 1, 330, 500, "later keys", 128, shift=3)
    assert_seen(mutant(MUTANTS_IN_BLOCKS[name]), inputs, WHOLE, seen)


@pytest.mark.parametrize("name", MUTANTS_IN_PARTS)
def test_mutants_in_parts_are_seen(name):
    inputs, seen = in_blocks(1, 2, 2, 520, 520, "causal", 64)
    assert_seen(mutant(MUTANTS_IN_PARTS[name]), inputs, Parts(bands=4, sets=2), seen)


@pytest.mark.parametrize("name", MUTANTS_OF_256)
def test_mutants_of_head_dim_256_are_seen(name):
    assert_seen(mutant(MUTANTS_OF_256[name], 256), *problem(*OF_256))


@pytest.mark.parametrize("name", MUTANTS_OF_256_IN_BLOCKS)
def test_mutants_of_head_dim_256_in_blocks_are_seen(name):
    inputs, seen = in_blocks(1, 1, 1, 200, 300, "later keys", 256, shift=3)
    assert_seen(mutant(MUTANTS_OF_256_IN_BLOCKS[name], 256), inputs, WHOLE, seen)
