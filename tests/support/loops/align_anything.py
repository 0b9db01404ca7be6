"""The DPOTrainer of PKU-Alignment/align-anything: left padding, and log-probabilities inside of each response."""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

SCALE_COEFF = 0.3


def left_padded(rows, value):
    return pad_sequence([torch.tensor(row[::-1]) for row in rows], batch_first=True, padding_value=value).flip(1)


def collate(pairs):
    rows = [(x.prompt, x.chosen) for x in pairs] + [(x.prompt, x.rejected) for x in pairs]
    return {
        "input_ids": left_padded([p + a for p, a in rows], 0),
        "attention_mask": left_padded([[1] * len(p + a) for p, a in rows], 0),
        "response_lens": [len(a) for _, a in rows],
    }


def gather_log_probabilities(logits, labels):
    return torch.gather(F.log_softmax(logits, dim=-1), dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)


def compute_log_probs(model, batch):
    ids, lengths = batch["input_ids"], batch["response_lens"]
    logits = model(input_ids=ids, attention_mask=batch["attention_mask"]).logits
    rows = zip(logits, ids, lengths, strict=True)
    return torch.stack([gather_log_probabilities(x[-n:][:-1], y[-n:][1:]).sum() for x, y, n in rows])


def train(policy, reference, batches, record):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for batch in map(collate, batches):
        better, worse = compute_log_probs(policy, batch).chunk(2)
        with torch.no_grad():
            ref_better, ref_worse = compute_log_probs(reference, batch).chunk(2)
        better_log_ratio, worse_log_ratio = better - ref_better, worse - ref_worse
        loss = -F.logsigmoid(SCALE_COEFF * (better_log_ratio - worse_log_ratio)).mean()
        loss.backward()
        record(loss=loss, better_reward=better_log_ratio.mean(), worse_reward=worse_log_ratio.mean())
        optimizer.step()
        optimizer.zero_grad()
