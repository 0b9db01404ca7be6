"""DPO with TRL and precomputed reference log-probabilities: training does not run the reference.

    python examples/precompute.py --model MODEL --dataset PAIRS.jsonl

Precomputing continues where it stopped when the program is killed and started again. The values are
stored next to the dataset, under a hash of model, tokens and options. For a custom training loop see
dpo_loop.py.
"""

import fastdpo

print(fastdpo.patch("trl.DPOTrainer"))

import argparse  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a causal LM with its tokenizer")
parser.add_argument("--dataset", required=True, help="pairs as .jsonl: prompt, chosen, rejected")
parser.add_argument("--max-length", type=int, default=1024)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=8, help="pairs per step")
parser.add_argument("--out", default="out/precompute")
args = parser.parse_args()

trainer = DPOTrainer(
    model=args.model,
    args=DPOConfig(
        output_dir=args.out,
        precompute_ref_log_probs=True,
        max_length=args.max_length,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        save_strategy="no",
        report_to="none",
        bf16=torch.accelerator.is_available(),
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=Dataset.from_json(args.dataset),
)
values = trainer.train_dataset.select_columns(["ref_chosen_logps", "ref_rejected_logps"]).to_pandas().mean()
print(f"Means over {len(trainer.train_dataset)} pairs, in nats: {values.to_dict()}")
trainer.train()
for (trainer_name, model, path), n in sorted(fastdpo.calls.items()):
    print(f"{trainer_name}: {n} {path} calls of the {model} model")
