"""Trainings as four kinds of trainers write them, which `check --resume` stops and resumes; and faults in such a training.

Each is train(steps, save=None, resume=None). Attention is that of cli/gpt.py, compiled and rewritten.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import dash_inductor
from dash_inductor import emulation
from dash_inductor.cli.gpt import GPT

LENGTH, WIDTH, HEADS, BATCH, TOKENS = 96, 32, 2, 2, 256


def weights(model):
    """The model's, if its attention became a kernel of ours."""
    attentions = dash_inductor.decisions()
    assert attentions and all(decision.rewritten for decision in attentions), attentions
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gpt(length=LENGTH, layers=1):
    """A model with the same weights each time, in strict mode."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    return GPT(length, WIDTH, HEADS, layers)


def nanogpt(steps, save=None, resume=None):
    """nanoGPT's loop: random places of a text, warm-up and decay of the rate, clipped gradients, two batches a step."""
    model = gpt()
    text = torch.randint(TOKENS, (10_000,))
    grouped = [
        {"params": [p for p in model.parameters() if p.dim() >= 2]},
        {"params": [p for p in model.parameters() if p.dim() < 2]},
    ]
    optimizer, first = torch.optim.AdamW(grouped, lr=1e-3, betas=(0.9, 0.95)), 0
    if resume:
        saved = torch.load(resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        first = saved["iter_num"]
    compiled = torch.compile(model)
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 2) * 0.9**step
        for _ in range(2):
            places = torch.randint(len(text) - LENGTH, (BATCH,)).tolist()
            x, y = (torch.stack([text[at + ahead : at + ahead + LENGTH] for at in places]) for ahead in (0, 1))
            (compiled(x, y) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if save:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(states | {"iter_num": steps}, save)
    return weights(model)


class Batches:
    """Batches that a generator draws, which have its state, as torchdata's StatefulDataLoader has."""

    def __init__(self, length=LENGTH, most=100):
        self.length, self.most, self.generator = length, most, torch.Generator().manual_seed(1)

    def __len__(self):
        return self.most

    def __iter__(self):
        for _ in range(self.most):
            tokens = torch.randint(TOKENS, (BATCH, self.length + 1), generator=self.generator)
            yield tokens[:, :-1], tokens[:, 1:]

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


class TrainState:
    """The step, as torchtitan keeps it."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


def torchtitan(steps, save=None, resume=None):
    """torchtitan's loop: layers compiled one by one under activation checkpointing, states by torch.distributed.checkpoint."""
    model, batches, state = gpt(layers=2), Batches(), TrainState()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(checkpoint_wrapper(block, preserve_rng_state=False), fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))

    def states():
        made = {"model": model.state_dict(), "batches": batches, "train_state": state, "warm_up": warm_up}
        return made | {"optimizer": get_optimizer_state_dict(model, optimizer)}

    if resume:
        loaded = states()
        dcp.load(loaded, checkpoint_id=resume, no_dist=True)
        model.load_state_dict(loaded["model"])
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    drawn = iter(batches)
    while state.step < steps:
        optimizer.zero_grad()
        model(*next(drawn)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        warm_up.step()
        state.step += 1
    if save:
        dcp.save(states(), checkpoint_id=save, no_dist=True)
    return weights(model)


def trainer(steps, save=None, resume=None):
    """transformers' Trainer with full_determinism=True, which shuffles, and resumes in the middle of an epoch."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, enable_full_determinism

    with tempfile.TemporaryDirectory() as folder:
        enable_full_determinism(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": HEADS, "num_key_value_heads": 1}
        config = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=TOKENS, max_position_embeddings=LENGTH, use_cache=False)
        model = LlamaForCausalLM(config)
        data = [{"input_ids": row, "labels": row} for row in torch.randint(TOKENS, (20, LENGTH))]
        arguments = TrainingArguments(
            output_dir=save or folder,
            full_determinism=True,
            torch_compile=True,
            use_cpu=True,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            lr_scheduler_type="constant",
            save_strategy="steps" if save else "no",
            save_steps=steps,
            report_to="none",
            disable_tqdm=True,
        )
        Trainer(model, arguments, train_dataset=data).train(
            resume_from_checkpoint=str(next(Path(resume).glob("checkpoint-*"))) if resume else None
        )
        return weights(model)


def lightning(steps, save=None, resume=None):
    """Lightning's Trainer with deterministic=True, a module that is compiled as a whole, and a loader with a state."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = gpt()
            self.loss = torch.compile(self.model, backend="dash")

        def training_step(self, batch):
            return self.loss(*batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    fit = lightning.Trainer(max_steps=steps, deterministic=True, accelerator="cpu", devices=1, gradient_clip_val=1.0, **quiet)
    fit.fit(module, Batches(), ckpt_path=resume)
    if save:
        fit.save_checkpoint(save)
    return weights(module.model)


def nanogpt_step():
    return nanogpt(1)


def torchtitan_step():
    return torchtitan(1)


def trainer_step():
    return trainer(1)


def lightning_step():
    return lightning(1)


def attends_once():
    return attends(1)


def attends(steps, save=None, resume=None, *, resumed_on=8):
    """Gradients of an attention that is long enough for another order on other SMs."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    sms = resumed_on if resume else 8
    dash_inductor.configure(sms=sms)  # what the manifest has, which is made behind the emulation
    if save:
        torch.save({}, save)
    tensors = [torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3)]
    attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    with emulation.emulate(sms=sms):
        for _ in range(steps):
            attend(*tensors).square().sum().backward()
    return dict(zip("qkv", (x.grad for x in tensors), strict=True))


def on_other_sms(steps, save=None, resume=None):
    return attends(steps, save, resume, resumed_on=4)


def in_the_order_of_a_set():
    """Parameters by name, as a set has them: dropout gives each what is drawn next."""
    torch.manual_seed(0)
    layers = {f"layer {n}": nn.Linear(2, 2) for n in range(30)}
    for layer in layers.values():
        nn.init.ones_(layer.weight)
    torch.manual_seed(1)
    for name in set(layers):
        F.dropout(layers[name](torch.ones(1, 2)), 0.5).sum().backward()
    return nn.ModuleList(layers.values())


class Layer(nn.Module):
    """Tokens of any length to the loss of those that follow."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x, y):
        query, key, value = self.qkv(self.norm(self.embed(x))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return F.cross_entropy(self.head(attended.transpose(1, 2).flatten(2)).flatten(0, 1), y.flatten())


def of_any_length(steps, save=None, resume=None, dynamic=True):
    """Lengths that vary, through one graph for all of them."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model, first = Layer(), 0
    if resume:
        saved = torch.load(resume)
        model.load_state_dict(saved["model"])
        first = saved["step"]
    compiled = torch.compile(model, backend="dash", dynamic=dynamic)
    with emulation.emulate():
        for step in range(first, steps):
            length = (64, 96, 64, 80, 64)[step]
            tokens = torch.randint(TOKENS, (2, length + 1), generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            compiled(tokens[:, :-1], tokens[:, 1:]).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    if save:
        torch.save({"model": model.state_dict(), "step": steps}, save)
    return weights(model)


def of_the_first_length(steps, save=None, resume=None):
    """The same where the first length that a process meets has a graph of its own, as torch.compile does by itself."""
    return of_any_length(steps, save, resume, dynamic=None)
