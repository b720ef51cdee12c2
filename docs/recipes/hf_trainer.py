"""transformers' Trainer with full_determinism=True: two runs have the same bits, attention's backward included.

    python hf_trainer.py                            # on a GPU
    DASH_INDUCTOR_EMULATE=1 python hf_trainer.py    # without one, at toy size

Needs dash-inductor, transformers and accelerate; no download: the model is a Llama with random weights, the data random tokens.
`full_determinism=True` seeds everything and turns on strict deterministic mode; `torch_compile=True` compiles the model, and the
installed package does the rest (Trainer knows no backend="dash"). Promises the same losses and weights for the same software and
GPU model: run it twice and compare the last line. Your own model: best without dropout in attention, which
not every GPU lets be rewritten; `dash_inductor.decisions()` says so.
"""

import hashlib
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, enable_full_determinism

import dash_inductor

GPU = torch.cuda.is_available()
SIZES = (
    {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2}
    if GPU
    else {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
)
LENGTH, BATCH, STEPS = (2048, 4, 10) if GPU else (96, 2, 2)

enable_full_determinism(0)  # before the model draws its weights; Trainer calls it again
config = LlamaConfig(**SIZES, vocab_size=256, max_position_embeddings=LENGTH, use_cache=False)
model = LlamaForCausalLM(config)
tokens = torch.randint(config.vocab_size, (STEPS * BATCH, LENGTH))
data = [{"input_ids": row, "labels": row} for row in tokens]  # all of one length: no padding, no attention_mask

with tempfile.TemporaryDirectory() as folder:
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
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=data).train()

attentions = dash_inductor.decisions()
assert attentions and all(decision.rewritten for decision in attentions), attentions
weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
digest = hashlib.sha256(weights.cpu().numpy()).hexdigest()[:16]
print(f"attentions rewritten: {len(attentions)}; weights: {digest}")
