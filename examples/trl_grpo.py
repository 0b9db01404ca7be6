"""GRPO with TRL: the completions of a prompt share it when they are scored.

    python examples/trl_grpo.py --model MODEL --dataset PROMPTS.jsonl

Generation and rewards are not changed. For RLOO, replace GRPO by RLOO throughout.
"""

import fastdpo

print(fastdpo.patch("trl.GRPOTrainer"))

import argparse  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a causal LM with its tokenizer")
parser.add_argument("--dataset", required=True, help="prompts as .jsonl: the column prompt")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--prompts", type=int, default=4, help="prompts per generation")
parser.add_argument("--completions", type=int, default=8, help="completions of each prompt")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--out", default="out/trl_grpo")
args = parser.parse_args()


def variety(completions: list[str], **columns) -> list[float]:
    """Returns the number of different words in each completion. Use a verifier or a reward model here."""
    return [float(len(set(completion.split()))) for completion in completions]


trainer = GRPOTrainer(
    model=args.model,
    reward_funcs=variety,
    args=GRPOConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.prompts * args.completions,
        num_generations=args.completions,
        num_iterations=2,  # each generation is trained on twice, against the log-probabilities of the old policy
        beta=0.04,
        max_completion_length=args.max_new_tokens,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=torch.accelerator.is_available(),
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=Dataset.from_json(args.dataset).select_columns("prompt"),
)
trainer.train()
for (trainer_name, model, path), n in sorted(fastdpo.calls.items()):
    print(f"{trainer_name}: {n} {path} calls of the {model} model")
