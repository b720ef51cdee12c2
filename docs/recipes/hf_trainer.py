"""transformers' Trainer with full_determinism=True: two runs have the same bits, attention's backward included.

    python hf_trainer.py                            # on a GPU
    DASH_INDUCTOR_EMULATE=1 python hf_trainer.py    # without one, at toy size

Needs dash-inductor, transformers and accelerate; no download: the model is a Llama with random weights, the data random tokens.
`full_determinism=True` seeds everything and turns on strict deterministic mode; `torch_compile=True` compiles the model, and the
installed package does the rest (Trainer knows no backend="dash"). Promises the same losses and weights for the same software and
GPU model, resumed from a checkpoint or not: run it twice and compare the last line. Beside each checkpoint a manifest says what
decides the bits. Your own model: best without dropout in attention, which not every GPU lets be rewritten;
`dash_inductor.decisions()` says so.
"""

import hashlib
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, enable_full_determinism

import dash_inductor

GPU = torch.cuda.is_available()
SIZES = (
    {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    if GPU
    else {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
)
LENGTH, BATCH, STEPS = (2048, 4, 10) if GPU else (96, 2, 2)


class KeepsManifest(TrainerCallback):
    """Writes what decides bits beside each checkpoint, and holds a run that is resumed to that."""

    def on_save(self, args, state, control, **_):
        dash_inductor.manifest().write(self.path(args, state))

    def on_train_begin(self, args, state, control, **_):
        if state.global_step > 0 and self.path(args, state).exists():
            dash_inductor.manifest(check=self.path(args, state))

    def path(self, args, state):
        return Path(args.output_dir, f"checkpoint-{state.global_step}", f"manifest-{args.process_index}.json")


def train(folder, *, resume):
    """The weights after all steps; of a run that is resumed, from the checkpoint half-way on."""
    enable_full_determinism(0)  # before the model draws its weights; Trainer calls it again
    config = LlamaConfig(**SIZES, vocab_size=256, max_position_embeddings=LENGTH, use_cache=False)
    model = LlamaForCausalLM(config)
    tokens = torch.randint(config.vocab_size, (STEPS * BATCH, LENGTH))
    data = [{"input_ids": row, "labels": row} for row in tokens]  # all of one length: no padding, no attention_mask
    arguments = TrainingArguments(
        output_dir=folder,
        full_determinism=True,
        torch_compile=True,
        bf16=GPU,
        use_cpu=not GPU,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=STEPS // 2,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[KeepsManifest()])
    trainer.train(resume_from_checkpoint=str(Path(folder, f"checkpoint-{STEPS // 2}")) if resume else None)
    return torch.cat([p.detach().float().flatten() for p in model.parameters()]).cpu()


with tempfile.TemporaryDirectory() as folder:
    weights, resumed = train(folder, resume=False), train(folder, resume=True)

attentions = dash_inductor.decisions()
assert attentions and all(decision.rewritten for decision in attentions), attentions
assert torch.equal(weights, resumed), "the resumed run has other bits"
digest = hashlib.sha256(weights.numpy()).hexdigest()[:16]
print(f"attentions rewritten: {len(attentions)}; weights: {digest}")
