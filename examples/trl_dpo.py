"""DPO with TRL: importing and patching fastdpo is all that is new.

python examples/trl_dpo.py --model MODEL --dataset PAIRS.jsonl
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
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=8, help="pairs per step")
parser.add_argument("--out", default="out/trl_dpo")
args = parser.parse_args()

splits = Dataset.from_json(args.dataset).train_test_split(0.2, seed=0)
trainer = DPOTrainer(
    model=args.model,
    args=DPOConfig(
        output_dir=args.out,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        bf16=torch.accelerator.is_available(),
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=splits["train"],
    eval_dataset=splits["test"],
)
trainer.train()
for (trainer_name, model, path), n in sorted(fastdpo.calls.items()):
    print(f"{trainer_name}: {n} {path} calls of the {model} model")
