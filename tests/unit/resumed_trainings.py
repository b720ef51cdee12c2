"""Trainings that `check --resume` runs: one that saves all that it goes on from, and some that forget a part of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

FORGOTTEN = "nothing"


def train(steps, save=None, resume=None, forgotten=FORGOTTEN, compiled=False, lengths=(8,)):
    """Dropout draws from torch's generator, data from one of its own."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    data, first = torch.Generator().manual_seed(1), 0
    model = torch.compile(layers, backend="aot_eager") if compiled else layers
    if resume:
        saved = torch.load(resume)
        first = saved["step"]
        layers.load_state_dict(saved["layers"])
        if forgotten != "optimizer":
            optimizer.load_state_dict(saved["optimizer"])
        if forgotten != "data":
            data.set_state(saved["data"])
        if forgotten != "dropout":
            torch.set_rng_state(saved["dropout"])
    for step in range(first, steps):
        tokens = torch.randint(16, (2, lengths[step % len(lengths)] + 1), generator=data)  # HERE data
        loss = F.cross_entropy(F.dropout(model(tokens[:, :-1]), 0.5).flatten(0, 1), tokens[:, 1:].flatten())  # HERE dropout
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # HERE optimizer
    if save:
        states = {"layers": layers.state_dict(), "optimizer": optimizer.state_dict(), "data": data.get_state(), "step": steps}
        torch.save(states | {"dropout": torch.get_rng_state()}, save)
    return {name: parameter.detach() for name, parameter in layers.named_parameters()}


def forgets_data(steps, save=None, resume=None):
    return train(steps, save, resume, forgotten="data")


def forgets_dropout(steps, save=None, resume=None):
    return train(steps, save, resume, forgotten="dropout")


def forgets_optimizer(steps, save=None, resume=None):
    return train(steps, save, resume, forgotten="optimizer")


def saves_nothing(steps, save=None, resume=None):
    return train(steps)


def takes_nothing(steps):
    return train(steps)
