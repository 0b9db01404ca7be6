"""TRL's A2POTrainer: one completion of each prompt, scored by policy and reference."""

import functools

from tests.contract.harness import Harness, bypassed, sabotaged_by, with_dropout
from tests.support import faults
from tests.support.trl.a2po import A2PO, reward
from tests.support.trl.dpo import train_both, trained_adapter
from tests.support.trl.online import writer


def half(completions: list[str], **columns) -> list[float]:
    return [0.5 * bool(completion) for completion in completions]


FULL = dict(policy=3, reference=3)
GPT2 = dict(without=("head_dim", "num_key_value_heads", "intermediate_size"))
GPT2 |= dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
OPTIONS = {
    "as it is": (dict(), FULL),
    "large beta": (dict(beta2=1.0, beta1=0.1), FULL),
    "one token": (dict(max_completion_length=1), FULL),
    "prompts cut": (dict(max_prompt_length=4), FULL),
    "temperature": (dict(temperature=0.5, top_k=5), FULL),  # of the generation alone
    "two rewards": (dict(reward_funcs=[reward, half], reward_weights=[0.5, 1.0]), FULL),
    "evaluation": (dict(evaluate=6), dict(policy=3, reference=3 + 2, eval=2)),
    "accumulation": (dict(gradient_accumulation_steps=2, max_steps=2), dict(policy=4, reference=4)),
    "batch of one": (dict(per_device_train_batch_size=1), FULL),
    "loaded adapter": (dict(prepare=trained_adapter), FULL),  # which TRL copies
    "checkpointing": (dict(gradient_checkpointing=True), FULL),
    "compiled": (dict(torch_compile=True, torch_compile_backend="eager", max_steps=1), dict(policy=1, reference=1)),
    "learned positions": (dict(kind="gpt2", tiny=GPT2), FULL),  # which count the padding of a prompt
    "softcap": (dict(kind="gemma2", tiny=dict(query_pre_attn_scalar=8, final_logit_softcapping=3.0)), FULL),
    "scaled logits": (dict(kind="granite", tiny=dict(logits_scaling=4.0)), FULL),
}


class OwnScores(A2PO.trainer_class):
    """Sums log-probabilities without TRL's function."""

    def _get_sequence_logps(self, model, input_ids, attention_mask, logits_to_keep):
        logits = model(input_ids, attention_mask).logits[:, -logits_to_keep - 1 : -1]
        logps = logits.log_softmax(-1).gather(2, input_ids[:, -logits_to_keep:, None])[..., 0]
        return (logps * attention_mask[:, -logits_to_keep:]).sum(1)


HARNESSES = [
    Harness(
        **A2PO.for_harness()
        | dict(calls=dict(policy=1, reference=1), models=lambda: [writer()], one_step=dict(max_steps=1, beta2=1.0)),
        both=functools.partial(
            train_both,
            reference=False,
            trainer="trl.A2POTrainer",
            train=A2PO.train,
            build=lambda kind, seed, **config: writer(seed, kind, **config),
        ),
        options=OPTIONS,
        fallbacks=with_dropout({("policy", "stock"): 3, ("reference", "fused"): 3}),
        bypassing=bypassed(OwnScores, "_get_sequence_logps"),
        sabotages=sabotaged_by(faults.labels_a_token_late, faults.late_positions)
        | sabotaged_by(faults.without_a_result, max_steps=3, beta2=1.0),
        verified={"as it is": (dict(max_steps=2), 2)},
        ranks=(dict(evaluate=4), dict(policy=3, reference=3 + 1, eval=1)),
    )
]
