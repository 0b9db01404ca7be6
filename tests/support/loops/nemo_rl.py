"""The DPOLossFn of NVIDIA-NeMo/RL: chosen and rejected rows in turn, masks of tokens, and an SFT term."""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

KL_PENALTY, SFT_WEIGHT = 0.3, 0.5


def collate(pairs):
    rows = [(pair.prompt, answer) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    return {
        "input_ids": pad_sequence([torch.tensor(p + a) for p, a in rows], batch_first=True),
        "input_lengths": torch.tensor([len(p + a) for p, a in rows]),
        "token_mask": pad_sequence([torch.tensor([0] * len(p) + [1] * len(a)) for p, a in rows], batch_first=True),
    }


def next_token_logprobs(model, data):
    ids = data["input_ids"]
    attention_mask = (torch.arange(ids.shape[1]) < data["input_lengths"][:, None]).long()
    position_ids = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    inputs = dict(attention_mask=attention_mask, position_ids=position_ids)
    logits = model(input_ids=ids, **inputs, use_cache=False).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def loss_fn(logprobs, reference_logprobs, data):
    token_mask = data["token_mask"][:, 1:]
    rewards = ((logprobs - reference_logprobs) * token_mask).sum(-1)
    chosen, rejected = rewards[::2], rewards[1::2]
    preference_loss = -F.logsigmoid(KL_PENALTY * (chosen - rejected)).mean()
    sft_loss = -((logprobs * token_mask).sum(-1) / token_mask.sum(-1))[::2].mean()
    return preference_loss + SFT_WEIGHT * sft_loss, dict(sft_loss=sft_loss, rewards_chosen=chosen.mean())


def train(policy, reference, batches, record):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for data in map(collate, batches):
        with torch.no_grad():
            reference_logprobs = next_token_logprobs(reference, data)
        loss, metrics = loss_fn(next_token_logprobs(policy, data), reference_logprobs, data)
        loss.backward()
        record(loss=loss, **metrics)
        optimizer.step()
        optimizer.zero_grad()
