"""Layers of torch.nn, as they are used: heads of 64, dropout 0 but where a case says otherwise."""

from __future__ import annotations

import torch
from torch import nn

from .model import PLAIN, Call, Model

DIM, HEADS, LENGTH = 512, 8, 256
DROPOUT, KEY_PADDING, CAUSAL = "train dropout 0.1", "src_key_padding_mask", "is_causal mask"
WEIGHTS, NO_WEIGHTS, PADDED_KEYS = "need_weights=True (default)", "need_weights=False", "need_weights=False key_padding_mask"
DECODED, DECODED_DROPOUT = "tgt_mask causal+memory", "dropout 0.1 default"


def encoder_layer(case: str) -> Call:
    """`nn.TransformerEncoderLayer`."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, dropout=0.1 if case == DROPOUT else 0.0, batch_first=True)
    x = torch.randn(2, LENGTH, DIM)
    if case == KEY_PADDING:
        return Call(layer, (x,), {"src_key_padding_mask": torch.zeros(2, LENGTH, dtype=torch.bool)})
    if case == CAUSAL:
        return Call(layer, (x,), {"src_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH), "is_causal": True})
    return Call(layer, (x,))


def encoder(case: str) -> Call:
    """`nn.TransformerEncoder` of padded sequences."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, dropout=0.0, batch_first=True)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    return Call(nn.TransformerEncoder(layer, 2), (torch.randn(2, LENGTH, DIM),), {"src_key_padding_mask": padding})


def multihead(case: str) -> Call:
    """`nn.MultiheadAttention`."""
    x = torch.randn(2, LENGTH, DIM)
    options = {} if case == WEIGHTS else {"need_weights": False}
    padding = {"key_padding_mask": torch.zeros(2, LENGTH, dtype=torch.bool)} if case == PADDED_KEYS else {}
    return Call(nn.MultiheadAttention(DIM, HEADS, batch_first=True), (x, x, x), {**options, **padding})


def decoder_layer(case: str) -> Call:
    """`nn.TransformerDecoderLayer`."""
    layer = nn.TransformerDecoderLayer(DIM, HEADS, dropout=0.1 if case == DECODED_DROPOUT else 0.0, batch_first=True)
    mask = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH)} if case == DECODED else {}
    return Call(layer, (torch.randn(2, LENGTH, DIM), torch.randn(2, 100, DIM)), mask)


MODELS = (
    Model("torch.nn", "nn.TransformerEncoderLayer", encoder_layer, (DROPOUT, PLAIN, KEY_PADDING, CAUSAL)),
    Model("torch.nn", "nn.TransformerEncoder", encoder, ("padding (nested off in train)",)),
    Model("torch.nn", "nn.MultiheadAttention", multihead, (WEIGHTS, NO_WEIGHTS, PADDED_KEYS)),
    Model("torch.nn", "nn.TransformerDecoderLayer", decoder_layer, (DECODED, DECODED_DROPOUT)),
)
