"""The DPO notebook of rasbt/LLMs-from-scratch: a GPT of its own, and chosen and rejected rows in two calls."""

import torch
import torch.nn.functional as F
from torch import nn

BETA = 0.3


class MultiHeadAttention(nn.Module):
    def __init__(self, size, context_length, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, size // num_heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(size, size)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        b, num_tokens, _ = x.shape
        projected = (f(x) for f in (self.W_key, self.W_query, self.W_value))
        keys, queries, values = (x.view(b, num_tokens, self.num_heads, -1) for x in projected)
        keys, queries, values = keys.transpose(1, 2), queries.transpose(1, 2), values.transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        attn_scores.masked_fill_(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        context = torch.softmax(attn_scores / self.head_dim**0.5, dim=-1) @ values
        return self.out_proj(context.transpose(1, 2).reshape(b, num_tokens, -1))


class TransformerBlock(nn.Module):
    def __init__(self, size, context_length, num_heads):
        super().__init__()
        self.att = MultiHeadAttention(size, context_length, num_heads)
        self.ff = nn.Sequential(nn.Linear(size, size), nn.GELU())
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class GPTModel(nn.Module):
    def __init__(self, vocab_size=97, size=32, context_length=64, num_heads=4, layers=2):
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(vocab_size, size), nn.Embedding(context_length, size)
        self.trf_blocks = nn.ModuleList(TransformerBlock(size, context_length, num_heads) for _ in range(layers))
        self.final_norm, self.out_head = nn.LayerNorm(size), nn.Linear(size, vocab_size, bias=False)

    def forward(self, in_idx):
        x = self.tok_emb(in_idx) + self.pos_emb(torch.arange(in_idx.shape[1]))
        for block in self.trf_blocks:
            x = block(x)
        return self.out_head(self.final_norm(x))


def collate(pairs):
    length = max(len(x.prompt) + max(len(x.chosen), len(x.rejected)) for x in pairs)
    batch = {}
    for name in ("chosen", "rejected"):
        rows = [x.prompt + getattr(x, name) for x in pairs]
        batch[name] = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        spans = [(len(x.prompt), len(row)) for x, row in zip(pairs, rows, strict=True)]
        batch[f"{name}_mask"] = torch.tensor([[a <= i < b for i in range(length)] for a, b in spans])
    return batch


def compute_logprobs(logits, labels, selection_mask):
    labels, log_probs = labels[:, 1:], F.log_softmax(logits[:, :-1, :], dim=-1)
    selected = torch.gather(log_probs, dim=-1, index=labels.unsqueeze(-1)).squeeze(-1) * selection_mask[:, 1:]
    return selected.sum(-1) / selection_mask[:, 1:].sum(-1)


def logprobs_of_batch(model, batch):
    names = ("chosen", "rejected")
    return [compute_logprobs(model(batch[name]), batch[name], batch[f"{name}_mask"]) for name in names]


def train(policy, reference, batches, record):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for batch in map(collate, batches):
        chosen, rejected = logprobs_of_batch(policy, batch)
        with torch.no_grad():
            ref_chosen, ref_rejected = logprobs_of_batch(reference, batch)
        loss = -F.logsigmoid(BETA * ((chosen - rejected) - (ref_chosen - ref_rejected))).mean()
        loss.backward()
        record(loss=loss, chosen_reward=(chosen - ref_chosen).mean(), rejected_reward=(rejected - ref_rejected).mean())
        optimizer.step()
        optimizer.zero_grad()
