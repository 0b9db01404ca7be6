"""The BasicTrainer of eric-mitchell/direct-preference-optimization: concatenated rows, sums, cDPO or IPO."""

import torch
import torch.nn.functional as F

BETA, SMOOTHING = 0.3, 0.1


def pad_to_length(rows, value):
    return torch.tensor([row + [value] * (max(map(len, rows)) - len(row)) for row in rows])


def concatenated_inputs(pairs):
    rows = [(x.prompt, x.chosen) for x in pairs] + [(x.prompt, x.rejected) for x in pairs]
    return {
        "concatenated_input_ids": pad_to_length([p + a for p, a in rows], 0),
        "concatenated_attention_mask": pad_to_length([[1] * len(p + a) for p, a in rows], 0),
        "concatenated_labels": pad_to_length([[-100] * len(p) + a for p, a in rows], -100),
    }


def _get_batch_logps(logits, labels, average_log_prob=False):
    labels, logits = labels[:, 1:].clone(), logits[:, :-1, :]
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token_logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    if average_log_prob:
        return (per_token_logps * loss_mask).sum(-1) / loss_mask.sum(-1)
    return (per_token_logps * loss_mask).sum(-1)


class BasicTrainer:
    def __init__(self, policy, reference_model, record, loss="dpo"):
        self.policy, self.reference_model, self.record, self.loss = policy, reference_model.eval(), record, loss
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)

    def concatenated_forward(self, model, batch):
        batch = concatenated_inputs(batch)
        mask = batch["concatenated_attention_mask"]
        all_logits = model(batch["concatenated_input_ids"], attention_mask=mask).logits
        all_logps = _get_batch_logps(all_logits, batch["concatenated_labels"], average_log_prob=False)
        return all_logps.chunk(2)

    def get_batch_metrics(self, batch):
        policy_chosen, policy_rejected = self.concatenated_forward(self.policy, batch)
        with torch.no_grad():
            ref_chosen, ref_rejected = self.concatenated_forward(self.reference_model, batch)
        logits = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
        if self.loss == "ipo":
            losses = (logits - 1 / (2 * BETA)) ** 2
        else:
            losses = -F.logsigmoid(BETA * logits) * (1 - SMOOTHING) - F.logsigmoid(-BETA * logits) * SMOOTHING
        chosen, rejected = (
            BETA * (policy_chosen - ref_chosen).detach(),
            BETA * (policy_rejected - ref_rejected).detach(),
        )
        metrics = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
        return losses.mean(), {**metrics, "logps/chosen": policy_chosen.detach(), "loss": losses.detach()}

    def train(self, batches):
        for step, batch in enumerate(batches):
            self.optimizer.zero_grad()
            loss, metrics = self.get_batch_metrics(batch)
            loss.backward()
            self.log(step, metrics)
            self.optimizer.step()

    def log(self, step, metrics):
        self.record(**{name: x.mean() for name, x in metrics.items()})


def train(policy, reference, batches, record, loss="dpo"):
    BasicTrainer(policy, reference, record, loss).train(batches)
