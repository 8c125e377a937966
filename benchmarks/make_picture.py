"""Draw benchmarks/iterations.png from the newest records: ``python benchmarks/make_picture.py``."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ZERO, FSDP2 = "torch DDP + ZeRO", "FSDP2, resharded"
PANELS = [  # title, records, ranks, on how many a host, rate of the link, what counts as 1
    ("2 ranks, link of 1 Gbit/s", "overlap", 2, 1, "1gbit", ZERO),
    ("4 ranks, links of 1 Gbit/s", "overlap", 4, 1, "1gbit", ZERO),
    ("2 hosts of 2 ranks, link of 1 Gbit/s", "overlap", 4, 2, "1gbit", ZERO),
    ("2 ranks of one machine", "overlap", 2, 1, None, ZERO),
    ("2 ranks, link of 1 Gbit/s", "fully_sharded", 2, 1, "1gbit", FSDP2),
    ("2 ranks of one machine", "fully_sharded", 2, 1, None, FSDP2),
]
NAMES = {
    ZERO: "PyTorch's DDP + ZeRO",
    "ours, no overlap": "plain use",
    "ours, gradients sharded, lazy": "gradients sharded",
    FSDP2: "FSDP2",
    "ours, resharded": "parameters sharded",
}


def newest(name: str, ranks: int, per_host: int, rate: str | None, reference: str) -> dict[str, float]:
    """The seconds of an iteration of the GPT in the newest record that has the reference."""
    records: list[Any] = json.loads((HERE / "results" / f"{name}.json").read_text())
    runs = [run for record in records for run in record["results"].get("runs", ())]
    defaults = {"per_host": 1, "rate": "", "model": "gpt", "muon": False}
    wanted = {"ranks": ranks, "per_host": per_host, "rate": rate, "model": "gpt", "muon": False}
    fitting = [run for run in runs if all((defaults | run)[key] == wanted[key] for key in wanted)]
    seconds: dict[str, float] = [run["seconds"] for run in fitting if reference in run.get("seconds", ())][-1]
    return seconds


def main() -> None:
    figure, panes = plt.subplots(
        len(PANELS), figsize=(7, 9), sharex=True, layout="constrained", height_ratios=[4, 4, 4, 4, 2, 2]
    )
    for pane, (title, name, ranks, per_host, rate, reference) in zip(panes, PANELS, strict=True):
        seconds = newest(name, ranks, per_host, rate, reference)
        shown = [key for key in NAMES if key in seconds]
        ratios = [seconds[key] / seconds[reference] for key in shown]
        colors = ["tab:gray" if key == reference else "tab:blue" for key in shown]
        bars = pane.barh([NAMES[key] for key in shown], ratios, color=colors)
        pane.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3)
        pane.axvline(seconds["compute alone"] / seconds[reference], color="black", linestyle=":")
        pane.set_title(f"{title}, {1000 * seconds[reference]:.0f} ms = 1", loc="left", fontsize="medium")
        pane.invert_yaxis()
        pane.spines[["top", "right"]].set_visible(False)
    panes[-1].set_xlabel("time of an iteration, GPT of 13.8 M; dotted: compute alone")
    panes[-1].set_xlim(0, 1.15)
    figure.savefig(HERE / "iterations.png", dpi=110)


if __name__ == "__main__":
    main()
