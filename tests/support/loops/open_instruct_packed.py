"""The padding-free forward of allenai/open-instruct: one flat row, with positions and bounds. SimPO."""

import torch
import torch.nn.functional as F

BETA, GAMMA_BETA_RATIO = 2.0, 0.3


def collate(pairs):
    rows = [(x.prompt, x.chosen) for x in pairs] + [(x.prompt, x.rejected) for x in pairs]
    lengths = torch.tensor([len(p + a) for p, a in rows])
    return {
        "input_ids": torch.tensor([[y for p, a in rows for y in p + a]]),
        "labels": torch.tensor([[y for p, a in rows for y in [-100] * len(p) + a]]),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": F.pad(lengths.cumsum(0), (1, 0)).int(),
    }


def pf_get_batch_logps(logits, labels, cu_seq_lens):
    labels = labels[:, 1:].clone()
    loss_mask = labels != -100
    labels[labels == -100] = 0
    logps = torch.gather(logits[:, :-1].log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2) * loss_mask
    sizes = cu_seq_lens.diff()
    sizes[-1] -= 1  # the last token predicts nothing
    rows = zip(*(x[0].split(sizes.tolist()) for x in (logps, loss_mask)), strict=True)
    return torch.stack([x.sum() / m.sum() for x, m in rows])


def packed_forward(model, batch):
    positions = batch["position_ids"]
    logits = model(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits
    return pf_get_batch_logps(logits, batch["labels"], batch["cu_seq_lens_q"]).chunk(2)


def train(policy, reference, batches, record):
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    for batch in map(collate, batches):
        chosen, rejected = packed_forward(policy, batch)
        losses = -F.logsigmoid(BETA * ((chosen - rejected) - GAMMA_BETA_RATIO))
        losses.mean().backward()
        record(loss=losses.mean(), chosen=chosen.mean(), rejected=rejected.mean())
        optimizer.step()
        optimizer.zero_grad()
