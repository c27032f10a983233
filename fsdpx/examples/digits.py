"""Train a convolutional network on digits. This script draws the digits, so nothing is downloaded.

mpiexec -n 2 python -m fsdpx.examples.digits --strategy zero2"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np

import fsdpx
from fsdpx import data, nn, optim
from fsdpx.examples._cli import run_main
from fsdpx.examples.models import DIGIT_SIDE as SIDE
from fsdpx.examples.models import make_digits_model

FONT = (
    "0110 1001 1001 1001 1001 0110",
    "0010 0110 0010 0010 0010 0111",
    "0110 1001 0001 0010 0100 1111",
    "1110 0001 0110 0001 0001 1110",
    "0010 0110 1010 1111 0010 0010",
    "1111 1000 1110 0001 0001 1110",
    "0110 1000 1110 1001 1001 0110",
    "1111 0001 0010 0010 0100 0100",
    "0110 1001 0110 1001 1001 0110",
    "0110 1001 1001 0111 0001 0110",
)


def draw_digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw `count` noisy digits at random positions. Return images (count, 1, SIDE, SIDE) in float32, and labels
    (count,)."""
    glyphs = np.array([[[int(bit) for bit in row] for row in text.split()] for text in FONT], np.float32)
    rng = np.random.Generator(np.random.Philox(seed))
    labels = rng.integers(0, 10, count)
    images = rng.normal(0.0, 0.25, (count, 1, SIDE, SIDE)).astype(np.float32)
    tops, lefts = rng.integers(0, SIDE - 6, count), rng.integers(0, SIDE - 4, count)
    for image, label, top, left in zip(images, labels, tops, lefts, strict=True):
        image[0, top : top + 6, left : left + 4] += glyphs[label]
    return images, labels


def main(argv: Sequence[str] | None = None) -> int:
    """Train the network, and print the accuracy on held-out digits on rank 0. Return the exit status."""
    p = argparse.ArgumentParser(
        prog="python -m fsdpx.examples.digits", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    p.add_argument("--strategy", default="fsdp")
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--batch", type=int, default=64, help="images of the global batch")
    args = p.parse_args(argv)
    comm = fsdpx.init()
    trainer = make_digits_model().as_distributed(
        loss=nn.CrossEntropyLoss(), optimizer=optim.AdamW(lr=4e-3), strategy=args.strategy
    )
    train = data.DataLoader(data.ArrayDataset(*draw_digits(4000, seed=1)), args.batch, comm=comm, shuffle=True)
    held = data.DataLoader(data.ArrayDataset(*draw_digits(1000, seed=2)), 1000, comm=comm)
    right = {"accuracy": lambda output, target: output.argmax(axis=1) == target}
    with train, held:
        history = trainer.fit(train, epochs=args.epochs, validation=held, metrics=right, every=60, patience=5)
    if comm.rank == 0:
        assert history.best_step is not None  # set, because validation data was passed to `fit`
        accuracy = dict(history.metrics["accuracy"])[history.best_step]
        print(f"accuracy on 1,000 new digits: {100 * accuracy:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
