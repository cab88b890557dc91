"""What a small vision Transformer learns of handwritten digits, by the mechanism in its blocks.

The 1797 digits of scikit-learn, 8 x 8 pixels, 2 x 2 pixels a patch; the last 360 are kept for the test. Reported is the
share of these that each model names rightly: median, lowest and highest of the seeds. Run:

    python benchmarks/digits.py --seeds 3 --mechanism mha --mechanism linear
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from attn_models.vision.config import VisionConfig
from attn_models.vision.vit import VisionTransformer
from sklearn.datasets import load_digits
from torch import Tensor
from torch.nn.functional import cross_entropy

HELD = 360
BATCH = 64
RATE = 2e-3
MECHANISMS = ("mha", "sparsemax", "linear", "performer")


def digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 1, 8, 8] from 0 to 1, and which digit each is [1797]."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return images, torch.tensor(found.target)


def learned(mechanism: str, seed: int, steps: int) -> tuple[float, float]:
    """Train one model; the share of the test that it names rightly, in percent, and seconds of training."""
    images, names = digits()
    torch.manual_seed(seed)
    config = VisionConfig(
        image=8, patch=2, channels=1, classes=10, width=64, layers=3, heads=4, hidden=128, mechanism=mechanism
    )
    model = VisionTransformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    began = time.perf_counter()
    for _ in range(steps):
        chosen = torch.randint(len(images) - HELD, (BATCH,))
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), names[chosen]).backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - began
    with torch.inference_mode():
        right = model.eval()(images[-HELD:]).argmax(-1) == names[-HELD:]
    return 100 * right.float().mean().item(), seconds


def main() -> None:
    """Train all and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mechanism", action="append", help="one that sees both ways; may be repeated")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("| mechanism | right, % | training, s |\n|---|---|---|")
    for mechanism in args.mechanism or MECHANISMS:
        shares, seconds = zip(*(learned(mechanism, seed, args.steps) for seed in range(args.seeds)), strict=True)
        middle, low, high = statistics.median(shares), min(shares), max(shares)
        print(f"| `{mechanism}` | {middle:.1f} ({low:.1f}-{high:.1f}) | {statistics.median(seconds):.0f} |", flush=True)


if __name__ == "__main__":
    main()
