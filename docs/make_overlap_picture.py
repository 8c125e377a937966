"""Draw docs/overlap.png: one update of a GPT on two ranks, without overlap and with it, on one scale.

Run from the checkout: ``python docs/make_overlap_picture.py``. Takes half a minute.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from zero_optim.demo import trace

SIZES = "--width 384 --layers 6 --heads 6 --batch-size 2 --steps 12 --eval-every 0 --sample-length 0 --clip 0"
RUNS = {
    "step() after the backward pass": ["--overlap", "off"],
    'zero_step(optimizer, gradients="owners")': ["--overlap", "owners"],
}


def main() -> None:
    """Run, trace, draw."""
    pictures = []
    for title, options in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "zero_optim", "train", *SIZES.split(), *options, "--trace"]
            subprocess.run([*command, "--out", f"{folder}/run"], check=True, stdout=subprocess.DEVNULL)
            pictures.append((title, trace.spans_of(Path(folder, "run", trace.EVENTS))))
    for title, spans in pictures:
        print(f"{title}: {trace.hidden(spans):.0%} under forward and backward")  # noqa: T201
    trace.draw(pictures, Path(__file__).with_name("overlap.png"))


if __name__ == "__main__":
    main()
