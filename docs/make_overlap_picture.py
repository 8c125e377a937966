"""Draw docs/overlap.png and docs/sharded.png: one update of a GPT on two ranks, each way on one scale.

Run from the checkout: ``python docs/make_overlap_picture.py``, or with ``overlap`` or ``sharded`` for one of
them. Takes half a minute each.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from zero_optim.demo import trace

SIZES = "--width 384 --layers 6 --heads 6 --batch-size 2 --steps 12 --eval-every 0 --sample-length 0"
# By the name of the picture: the title of each run, and its options.
PICTURES = {
    "overlap": {
        "step() after the backward pass": "--overlap off --clip 0",
        'zero_step(optimizer, gradients="owners")': "--overlap owners --clip 0",
    },
    "sharded": {
        "DistributedDataParallel, clipping: every rank gets all gradients": "--clip 1",
        "ShardedDataParallel, clipping: each gradient goes to its owner": "--shard gradients --clip 1",
    },
}


def main(names: list[str]) -> None:
    """Run, trace, draw.

    Args:
        names: of the pictures; none for all.
    """
    for name in names or PICTURES:
        pictures = []
        for title, options in PICTURES[name].items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "zero_optim", "train", *SIZES.split(), *options.split()]
                command += ["--trace", "--out", f"{folder}/run"]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                pictures.append((title, trace.spans_of(Path(folder, "run", trace.EVENTS))))
        for title, spans in pictures:
            print(f"{title}: {trace.hidden(spans):.0%} under forward and backward")  # noqa: T201
        trace.draw(pictures, Path(__file__).with_name(f"{name}.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
