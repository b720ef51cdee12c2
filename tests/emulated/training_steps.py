"""Training steps for tests of `check`. The line of the operation that a report must name ends with the comment HERE."""

import itertools
import os
import random
import time

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

WIDTH = 16
ORDERS = itertools.cycle(itertools.permutations(["sin", "cos", "tanh"]))


@triton.jit
def scatter(OUT, X, n: tl.constexpr):
    """Adds to four elements, in the order in which the programs come."""
    columns = tl.arange(0, n)
    tl.atomic_add(OUT + columns % 4, tl.load(X + tl.program_id(0) * n + columns))


@torch.library.custom_op("check_tests::scatter", mutates_args=())
def scattered(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4)
    scatter[(x.numel() // WIDTH,)](out, x, WIDTH)
    return out


@scattered.register_fake
def _(x):
    return x.new_empty(4)


scattered.register_autograd(
    lambda ctx, grad: grad.repeat(ctx.length // 4),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "length", inputs[0].numel()),
)


@torch.library.custom_op("check_tests::clock", mutates_args=())
def clock(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + time.perf_counter_ns() % 1000003)


@clock.register_fake
def _(x):
    return torch.empty_like(x)


clock.register_autograd(lambda ctx, grad: grad)


class ClockInBackward(torch.autograd.Function):
    """Its backward reads the clock."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return clock(grad)  # HERE noisy_backward


def seeded():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH), torch.randn(64, WIDTH)


def train(model, loss):
    loss.backward()
    return model


def clean():
    model, x = seeded()
    return train(model, F.dropout(model(x), 0.5).sin().sum())


def uninitialised():
    """What nothing has written is not looked at, and no difference."""
    model, x = seeded()
    return train(model, torch.empty_like(x).copy_(model(x)).sum() + torch.empty(64, WIDTH).zero_().sum())


def atomics():
    model, x = seeded()
    y = scattered(model(x).flatten())  # HERE atomics
    return train(model, y.square().sum())


def launched_by_hand():
    """A kernel that no operation of torch wraps."""
    model, x = seeded()
    out = torch.zeros(4)
    scatter[(64,)](out, model(x).detach(), WIDTH)  # HERE launched_by_hand
    return train(model, model(x).sum() * out.sum())


def dropout_without_a_seed():
    model, x = seeded()
    torch.seed()
    y = F.dropout(model(x), 0.5)  # HERE dropout_without_a_seed
    return train(model, y.sum())


def reads_the_clock():
    model, x = seeded()
    y = clock(model(x))  # HERE reads_the_clock
    return train(model, y.square().sum())


def noisy_backward():
    model, x = seeded()
    return train(model, ClockInBackward.apply(model(x)).sum())


def squashed():
    """Its backward has no line of Python."""
    model, x = seeded()
    y = model(x).tanh()  # HERE squashed
    return train(model, y.sum())


def random_number():
    model, x = seeded()
    y = model(x) * random.random()  # HERE random_number
    return train(model, y.sum())


def another_order():
    """The names come in another order than in the last run, as a set's do in each process."""
    model, x = seeded()
    for name in next(ORDERS):
        x = getattr(x, name)()  # HERE another_order
    return train(model, model(x).sum())


@torch.compile
def summed(model, x, index):
    y = model(x)
    y = torch.zeros(4, WIDTH).index_add(0, index, y)  # HERE index_add_in_a_graph
    return y.square().sum()


def index_add_in_a_graph():
    model, x = seeded()
    x = x.repeat(32, 1) * torch.rand(2048, 1)
    return train(model, summed(model, x, torch.randint(0, 4, (2048,))))


@torch.compile
def looked_up(weight, index):
    y = weight[index]  # HERE lookup_in_the_backward
    return (y * torch.arange(2048)[:, None]).sin().sum()


def lookup_in_the_backward():
    model, _ = seeded()
    return train(model, looked_up(model.weight, torch.randint(0, WIDTH, (2048,))))


@torch.compile
def dropped(model, x):
    y = model(x)
    y = F.dropout(y, 0.5)  # HERE dropout_in_a_graph
    return y.sum()


def dropout_in_a_graph():
    model, x = seeded()
    torch.seed()
    return train(model, dropped(model, x))


class Attention(nn.Module):
    """One attention, whose CTAs share heads and wait for each other."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, WIDTH)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()


def attention():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = Attention()
    return train(model, torch.compile(model)(torch.randn(2, 130, WIDTH)))


def of_this_process():
    return {"process": torch.tensor(os.getpid())}
