"""The concatenated forward of allenai/open-instruct on padded batches: mean log-probabilities, and a router's loss."""

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

BETA, LOAD_BALANCING_WEIGHT = 2.0, 0.1


def concatenated_inputs(pairs):
    rows = [(x.prompt, x.chosen) for x in pairs] + [(x.prompt, x.rejected) for x in pairs]
    ids = pad_sequence([torch.tensor(p + a) for p, a in rows], batch_first=True)
    labels = pad_sequence([torch.tensor([-100] * len(p) + a) for p, a in rows], batch_first=True, padding_value=-100)
    mask = pad_sequence([torch.ones(len(p + a), dtype=torch.long) for p, a in rows], batch_first=True)
    return ids, mask, labels


def _get_batch_logps(logits, labels, average_log_prob):
    labels, logits = labels[:, 1:].clone(), logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    summed = (per_token_logps * loss_mask).sum(-1)
    return summed / loss_mask.sum(-1) if average_log_prob else summed


def concatenated_forward(model, batch):
    ids, mask, labels = concatenated_inputs(batch)
    outputs = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    all_logps = _get_batch_logps(outputs.logits, labels, average_log_prob=True)
    aux_loss = outputs.aux_loss
    return *all_logps.chunk(2), aux_loss


def train(policy, reference, batches, record):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for batch in batches:
        with torch.no_grad():
            ref_chosen, ref_rejected, _ = concatenated_forward(reference, batch)
        chosen, rejected, aux_loss = concatenated_forward(policy, batch)
        losses = -F.logsigmoid(BETA * ((chosen - rejected) - (ref_chosen - ref_rejected)))  # dpo_norm
        loss = losses.mean() + LOAD_BALANCING_WEIGHT * aux_loss
        loss.backward()
        record(loss=loss, aux_loss=aux_loss, chosen=chosen.mean(), rejected=rejected.mean())
        optimizer.step()
        optimizer.zero_grad()
