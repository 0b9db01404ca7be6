"""A trainer that fastdpo does not know, with the batches and the loss of DPO. The line for it is the
example in docs/trainers.md.
"""

import torch
from torch import nn
from torch.nn.functional import logsigmoid

IGNORED = -100


class PairTrainer:
    """Trains a model on batches of pairs, chosen rows first: input_ids, attention_mask and labels [2B, L]."""

    def __init__(self, model: nn.Module, reference: nn.Module, batches: list[dict[str, torch.Tensor]], beta=0.5):
        self.model, self.reference, self.batches, self.beta = model, reference.eval(), batches, beta
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.logs: list[dict[str, float]] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def log_probs(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The log-probability of each row [2B]."""
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (logps * (labels != IGNORED)).sum(1)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            reference = self.log_probs(self.reference, batch)
        chosen, rejected = (self.log_probs(self.model, batch) - reference).chunk(2)
        return -logsigmoid(self.beta * (chosen - rejected)).mean()

    def train(self) -> None:
        for step, batch in enumerate(self.batches):
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            self.gradients.append({name: x.grad.clone() for name, x in self.model.named_parameters()})
            self.optimizer.step()
            self.log(step, loss.item())

    def log(self, step: int, loss: float) -> None:
        self.logs.append({"step": step, "loss": loss})
