"""The full DPO recipe of torchtune: a decoder of its own, which takes masks and positions."""

import torch
from torchtune import rlhf
from torchtune.rlhf.loss import DPOLoss

loss_fn = DPOLoss(beta=0.3, label_smoothing=0.1)


def collate(pairs):
    rows = [(x.prompt, x.chosen) for x in pairs] + [(x.prompt, x.rejected) for x in pairs]
    length = max(len(p + a) for p, a in rows)
    ids = torch.tensor([p + a + [0] * (length - len(p + a)) for p, a in rows])
    labels = torch.tensor([[-100] * len(p) + a + [-100] * (length - len(p + a)) for p, a in rows])
    return ids, labels


def concatenated_forward(model, batch):
    concatenated_input_ids, concatenated_labels = batch
    all_logits = model(concatenated_input_ids)
    all_log_probs = rlhf.get_batch_log_probs(all_logits, concatenated_labels)
    return all_log_probs.chunk(2)


def train(policy, reference, batches, record):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for batch in map(collate, batches):
        chosen, rejected = concatenated_forward(policy, batch)
        with torch.no_grad():
            references = concatenated_forward(reference, batch)
        losses, chosen_rewards, rejected_rewards = loss_fn(chosen, rejected, *references)
        loss = losses.mean()
        loss.backward()
        record(loss=loss, chosen=chosen_rewards.mean(), rejected=rejected_rewards.mean())
        optimizer.step()
        optimizer.zero_grad()
