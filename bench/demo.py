"""Train the checkerboard network in FP32, in FP16 under torch.amp and under amp_ext, side by side.

    python bench/demo.py [--device cpu] [--out demo.png]

The three take their steps in turn. The script prints a table, and draws the target, the three
results, the losses and the loss scale over time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

import plot
from harness import ledger, table
from harness.table import three_digits
from workloads.checkerboard import training
from workloads.common import StepRecord, Trainer, device_parser, positive

# torch's defaults, except the interval (2000): the scale moves within the demo.
SCALER = {"init_scale": 65536.0, "growth_interval": 25}
GREY_LOSS = 0.25
LEARNED_LOSS = 0.1
SMOOTHED = 25  # steps; Adam's loss has spikes
LINES = {  # each narrower than the lines it may cover
    "FP32": {"color": plot.COLOURS["fp32"], "linewidth": 3.2},
    "torch.amp FP16": {"color": plot.COLOURS["torch"], "linewidth": 2.2, "linestyle": "--"},
    "amp_ext FP16": {"color": plot.COLOURS["amp_ext"], "linewidth": 1.2},
}
# Pixels per side, and steps under torch.amp: its FP16 convolutions are slow on a CPU. Three steps
# at 64 x 64 pixels take up to 15 s on two cores.
SIZES = {"cuda": 512, "cpu": 64}
TORCH_STEPS = {"cuda": 500, "cpu": 3}


@dataclass
class Leg:
    """Hold one way to train, for a number of steps."""

    trainer: Trainer
    steps: int
    records: list[StepRecord] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.trainer.name

    @property
    def milliseconds(self) -> float:
        """Return the median of the steps."""
        return statistics.median(record.milliseconds for record in self.records)

    @property
    def skipped(self) -> list[int]:
        """Return the steps (from 1) that the scaler skipped."""
        return [step for step, record in enumerate(self.records, 1) if record.skipped]


def train(legs: Sequence[Leg]) -> None:
    """Train all legs in turn, step by step."""
    with tqdm(total=sum(leg.steps for leg in legs), unit="step", file=sys.stderr) as bar:
        for step in range(max(leg.steps for leg in legs)):
            for leg in (leg for leg in legs if step < leg.steps):
                leg.records.append(leg.trainer.step())
                bar.update()
            losses = (f"{leg.name} {leg.records[-1].loss:.4f}" for leg in legs)
            bar.set_postfix_str(f"loss: {', '.join(losses)}", refresh=False)


def show(legs: Sequence[Leg]) -> None:
    """Print a line a leg, and sentences on speed and learning."""
    shared = min(leg.steps for leg in legs)
    names = ("", "steps", "ms a step", f"loss at {shared}", "final loss", "skipped steps")
    rows = []
    for leg in legs:
        losses = [f"{leg.records[place].loss:.4f}" for place in (shared - 1, -1)]
        cells = leg.name, str(leg.steps), three_digits(leg.milliseconds), *losses
        scale = f"{leg.trainer.scaler.get_scale():.10g}"
        rows.append([*cells, str(len(leg.skipped)), scale])
    table.show([*names, "final scale"], rows)
    fp32, theirs, ours = (leg.milliseconds for leg in legs)
    print(
        f"Median of the steps, taken in turn: amp_ext FP16 needs {ours / fp32:.2f} of FP32's time "
        f"and {ours / theirs:.3f} of torch.amp FP16's."
    )
    for leg in legs:
        print(outcome(leg, legs[0].steps))
    print(f"Learned: the loss, median of {SMOOTHED} steps, is below {LEARNED_LOSS} at the end.")


def outcome(leg: Leg, steps: int) -> str:
    """Say whether the leg has learned the checkerboard, unless it was given fewer steps."""
    if leg.steps < steps:
        slow = ": FP16 convolutions are slow on a CPU" if leg.trainer.device.type == "cpu" else ""
        return f"{leg.name} was stopped after {leg.steps} of {steps} steps{slow}."
    loss = statistics.median(record.loss for record in leg.records[-SMOOTHED:])
    learned = "has learned" if loss < LEARNED_LOSS else "has NOT learned"
    return f"{leg.name} {learned} the checkerboard: loss {loss:.4f}."


def picture(legs: Sequence[Leg], where: str) -> Figure:
    """Draw target and outputs above, losses and scale below."""
    pixels, target = legs[0].trainer.inputs, legs[0].trainer.targets
    panels = [("target", target[0, 0].cpu())]
    for leg in legs:
        title = f"{leg.name}\n{leg.steps} steps, {three_digits(leg.milliseconds)} ms each"
        panels.append((title, leg.trainer.predict(pixels)[0, 0]))

    side = pixels.shape[-1]
    figure = plot.canvas(11, 7, f"Learning a checkerboard of {side} x {side} pixels", [where])
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.05))
    for axes, (title, image) in zip(above.subplots(1, len(panels)), panels, strict=True):
        axes.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=title, xticks=[], yticks=[])
        axes.spines[:].set_visible(True)
    losses, scales = below.subplots(1, 2)
    plot_losses(losses, legs)
    plot_scales(scales, [leg for leg in legs if leg.trainer.scaler.is_enabled()])
    for axes in (losses, scales):
        axes.grid()
        axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    return figure


def plot_losses(axes: Axes, legs: Sequence[Leg]) -> None:
    for leg in legs:
        losses = [record.loss for record in leg.records]
        axes.plot(range(1, leg.steps + 1), losses, label=leg.name, **LINES[leg.name])
    for loss, text in ((GREY_LOSS, "all grey"), (LEARNED_LOSS, "learned")):
        axes.axhline(loss, color=plot.INK, linewidth=0.8, linestyle=":")
        axes.text(1.01, loss, text, transform=axes.get_yaxis_transform(), va="center")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title="Loss", xlabel="step", ylabel="mean squared error")


def plot_scales(axes: Axes, legs: Sequence[Leg]) -> None:
    for leg in legs:
        scales = [record.scale for record in leg.records]
        axes.step(range(1, leg.steps + 1), scales, where="post", label=leg.name, **LINES[leg.name])
    last = legs[-1]
    scales = [last.records[step - 1].scale for step in last.skipped]
    label = f"overflow, step skipped ({last.name}: {len(last.skipped)})"
    axes.plot(last.skipped, scales, "v", color=plot.INK, label=label)
    axes.set_yscale("log", base=2)
    axes.margins(y=0.2)
    words = f"doubled after {SCALER['growth_interval']} good steps, halved by an overflow"
    axes.set(title=f"Loss scale: {words}", xlabel="step", ylabel="loss scale")


def main(argv: Sequence[str] | None = None) -> None:
    parser = device_parser(__doc__)
    parser.add_argument("--size", type=positive, help="pixels per side")
    parser.add_argument("--steps", type=positive, default=500, help="steps of each training")
    parser.add_argument("--torch-steps", type=positive, help="steps under torch.amp")
    parser.add_argument("--out", type=Path, default=Path("demo.png"))
    options = parser.parse_args(argv)
    device = options.device
    size = options.size or SIZES[device.type]
    torch_steps = options.torch_steps or min(options.steps, TORCH_STEPS[device.type])
    described = ledger.describe(device, "python bench/demo.py")
    where = "{device_name}, torch {torch}".format(**described)
    print(f"Checkerboard {size} x {size} on {where}")
    counts = {"none": options.steps, "torch": torch_steps, "amp_ext": options.steps}
    legs = [Leg(training(amp, device, size, **SCALER), steps) for amp, steps in counts.items()]
    train(legs)
    show(legs)
    with plot.applied():
        picture(legs, where).savefig(options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
