"""Online DPO with TRL: the completions of a prompt share it, and only their tokens are scored.

    python examples/trl_online_dpo.py --model MODEL --dataset PROMPTS.jsonl

Generation and rewards are not changed.
"""

import fastdpo

print(fastdpo.patch("trl.OnlineDPOTrainer"))

import argparse  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a causal LM with its tokenizer")
parser.add_argument("--dataset", required=True, help="prompts as .jsonl: the column prompt")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=8, help="prompts per step")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--out", default="out/trl_online_dpo")
args = parser.parse_args()


def variety(completions: list[str], **columns) -> list[float]:
    """Returns the number of different words in each completion. Use a judge or a reward model here."""
    return [float(len(set(completion.split()))) for completion in completions]


tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
trainer = OnlineDPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(args.model),
    reward_funcs=variety,
    args=OnlineDPOConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=torch.accelerator.is_available(),
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=Dataset.from_json(args.dataset).select_columns("prompt"),
    processing_class=tokenizer,
)
trainer.train()
for (trainer_name, model, path), n in sorted(fastdpo.calls.items()):
    print(f"{trainer_name}: {n} {path} calls of the {model} model")
