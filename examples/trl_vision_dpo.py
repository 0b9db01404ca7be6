"""DPO on pairs with images, with TRL: each call of a model encodes an image once, not twice.

    python examples/trl_vision_dpo.py --model MODEL

Draws a shape in each picture. The chosen answer names its color, the rejected one another color.
"""

import fastdpo

print(fastdpo.patch("trl.DPOTrainer"))

import argparse  # noqa: E402
import random  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from PIL import Image, ImageDraw  # noqa: E402
from trl import DPOConfig, DPOTrainer  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True, help="a vision-language model with its processor")
parser.add_argument("--pairs", type=int, default=64)
parser.add_argument("--size", type=int, default=224, help="width and height of the pictures")
parser.add_argument("--batch-size", type=int, default=4, help="pairs per step")
parser.add_argument("--out", default="out/trl_vision_dpo")
args = parser.parse_args()

COLORS = ["red", "green", "blue", "yellow", "black", "orange"]


def picture(color: str, rng: random.Random) -> Image.Image:
    image = Image.new("RGB", (args.size, args.size), "white")
    left, top = (rng.randrange(args.size // 2) for _ in range(2))
    shape = rng.choice([ImageDraw.ImageDraw.ellipse, ImageDraw.ImageDraw.rectangle])
    shape(ImageDraw.Draw(image), (left, top, left + args.size // 3, top + args.size // 3), fill=color)
    return image


def pair(seed: int) -> dict:
    rng = random.Random(seed)
    color, other = rng.sample(COLORS, 2)
    return {
        "images": [picture(color, rng)],
        "prompt": [{"role": "user", "content": "Which color is the shape?"}],
        "chosen": [{"role": "assistant", "content": f"The shape is {color}."}],
        "rejected": [{"role": "assistant", "content": f"The shape is {other}."}],
    }


trainer = DPOTrainer(
    model=args.model,
    args=DPOConfig(
        output_dir=args.out,
        num_train_epochs=1,
        per_device_train_batch_size=args.batch_size,
        max_length=None,  # never cuts an image
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=torch.accelerator.is_available(),
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=Dataset.from_list([pair(seed) for seed in range(args.pairs)]),
)
trainer.train()
for (trainer_name, model, path), n in sorted(fastdpo.calls.items()):
    print(f"{trainer_name}: {n} {path} calls of the {model} model")
