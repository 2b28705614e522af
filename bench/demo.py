"""Train the checkerboard network in FP16 under amp_ext and under torch.amp, side by side.

    python bench/demo.py [--device cpu] [--out demo.png]

The two take their steps in turn. A table is printed, and a picture is written: the target, what was
learned, the losses and the loss scale over time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from tqdm import tqdm

from run import describe_environment
from workloads.checkerboard import StepRecord, Training, training

# torch's defaults, but for the interval (2000): the scale is to move within the demo.
SCALER = {"init_scale": 65536.0, "growth_interval": 25}
GREY_LOSS = 0.25
LEARNED_LOSS = 0.1
COLOURS = {"amp_ext": "#1b5fb4", "torch.amp": "#e07b00"}
DRAWING = 256
SKIP_COLOUR = "#c2185b"
ROW = "{:<12}{:>7}{:>14}{:>16}{:>13}{:>15}{:>14}"


@dataclass(frozen=True)
class Plan:
    """How large the demo is: pixels per side, steps under amp_ext and under torch."""

    size: int
    steps: int
    torch_steps: int


# torch's FP16 convolutions are slow on a CPU: 0.1 s a step at 16 x 16 pixels on two cores.
PLANS = {"cuda": Plan(512, 500, 500), "cpu": Plan(16, 500, 50)}


@dataclass
class Leg:
    """One way to train, for a number of steps."""

    name: str
    training: Training
    steps: int
    records: list[StepRecord] = field(default_factory=list)

    @property
    def skipped(self) -> list[int]:
        """The steps (from 1) that the scaler skipped."""
        return [step for step, record in enumerate(self.records, 1) if record.skipped]


def train(legs: Sequence[Leg], seconds: float) -> None:
    """All legs in turn, step by step, for about `seconds` at most."""
    deadline = time.monotonic() + seconds
    total = sum(leg.steps for leg in legs)
    with tqdm(total=total, unit="step", smoothing=0.05, file=sys.stderr) as bar:
        for step in range(max(leg.steps for leg in legs)):
            if step and time.monotonic() > deadline:
                break
            for leg in legs:
                if step < leg.steps:
                    leg.records.append(leg.training.step())
                    bar.update()
            last = legs[0].records[-1]
            bar.set_postfix_str(f"{legs[0].name}: loss {last.loss:.4f}, scale {last.scale:g}")


def table(legs: Sequence[Leg]) -> str:
    """A line a leg, then what has to be known to read it."""
    shared = min(len(leg.records) for leg in legs)
    times = step_times(legs, shared)
    names = ("", "steps", "step time ms", f"loss at {shared}", "final loss", "skipped steps")
    lines = [ROW.format(*names, "final scale")]
    for leg in legs:
        lines.append(
            ROW.format(
                leg.name,
                len(leg.records),
                f"{times[leg.name]:.2f}",
                f"{leg.records[shared - 1].loss:.4f}",
                f"{leg.records[-1].loss:.4f}",
                len(leg.skipped),
                f"{leg.training.scaler.get_scale():g}",
            )
        )
    lines.append(f"Step time: median of the first {shared} steps, which all legs took in turn.")
    return "\n".join(lines + [remark for leg in legs if (remark := cut_short(leg, legs[0].steps))])


def step_times(legs: Sequence[Leg], count: int) -> dict[str, float]:
    """Median milliseconds of each leg's first `count` steps."""
    return {
        leg.name: statistics.median(record.milliseconds for record in leg.records[:count])
        for leg in legs
    }


def cut_short(leg: Leg, steps: int) -> str:
    if len(leg.records) < leg.steps:
        return f"{leg.name} reached the time limit after {len(leg.records)} of {leg.steps} steps."
    if leg.steps < steps:
        reason = (
            ": FP16 convolutions are slow on a CPU" if leg.training.device.type == "cpu" else ""
        )
        return f"{leg.name} was stopped after {leg.steps} of {steps} steps{reason}."
    return ""


def verdict(leg: Leg) -> str:
    loss = leg.records[-1].loss
    outcome = "learned" if loss < LEARNED_LOSS else "has not learned"
    return f"{leg.name} {outcome} the checkerboard: loss {loss:.4f}; all grey gives {GREY_LOSS}."


def draw(legs: Sequence[Leg], where: str, out: Path) -> None:
    """The picture: target and outputs above, losses and scale below."""
    first = legs[0].training
    panels = [("target", first.target[0, 0].cpu())]
    panels += [
        (f"{leg.name}: output after {len(leg.records)} steps", leg.training.output())
        for leg in legs
    ]
    if first.size < DRAWING // 2:
        title = f"{legs[0].name}: network drawn at {DRAWING} x {DRAWING}"
        panels.insert(2, (title, first.drawing(DRAWING)))
    shared = min(len(leg.records) for leg in legs)
    times = ", ".join(f"{name} {ms:.3g} ms" for name, ms in step_times(legs, shared).items())

    figure = plt.figure(figsize=(13, 8.2), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    figure.suptitle(
        f"A checkerboard of {first.size} x {first.size} pixels, learned in FP16 on {where}\n"
        f"time of a step (median of the first {shared}, in turn): {times}",
        fontsize=12,
    )
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.05))
    for axes, (title, image) in zip(above.subplots(1, len(panels)), panels, strict=True):
        show(axes, title, image)
    losses, scales = below.subplots(1, 2)
    plot_losses(losses, legs)
    plot_scales(scales, legs)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def show(axes: Axes, title: str, image: torch.Tensor) -> None:
    axes.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.set_xticks([])
    axes.set_yticks([])


def plot_losses(axes: Axes, legs: Sequence[Leg]) -> None:
    for leg in legs:
        losses = [record.loss for record in leg.records]
        axes.plot(range(1, len(losses) + 1), losses, **style(leg, legs))
    axes.axhline(GREY_LOSS, color="#888888", linewidth=0.8)
    axes.annotate(
        "all grey",
        (1, GREY_LOSS),
        (-4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        color="#666666",
        fontsize=9,
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(title="Loss", xlabel="step", ylabel="mean squared error")
    finish(axes)


def plot_scales(axes: Axes, legs: Sequence[Leg]) -> None:
    for leg in legs:
        scales = [record.scale for record in leg.records]
        axes.step(range(1, len(scales) + 1), scales, where="post", **style(leg, legs))
    skipped = legs[0].skipped
    axes.plot(
        skipped,
        [legs[0].records[step - 1].scale for step in skipped],
        "v",
        color=SKIP_COLOUR,
        markersize=6,
        label=f"overflow, step skipped ({legs[0].name}: {len(skipped)})",
    )
    axes.set_yscale("log", base=2)
    axes.margins(y=0.3)
    interval = SCALER["growth_interval"]
    axes.set(
        title=f"Loss scale: doubled after {interval} good steps, halved by an overflow",
        xlabel="step",
        ylabel="loss scale",
    )
    finish(axes)


def style(leg: Leg, legs: Sequence[Leg]) -> dict[str, object]:
    """Later legs are dashed, so that equal curves are both seen."""
    label = f"{leg.name} ({len(leg.records)} steps)"
    first = leg is legs[0]
    return {
        "label": label,
        "color": COLOURS[leg.name],
        "linewidth": 1.4 if first else 2.0,
        "linestyle": "-" if first else (0, (3, 1.5)),
    }


def finish(axes: Axes) -> None:
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=tuple(PLANS), default=best)
    parser.add_argument("--size", type=int, help="pixels per side")
    parser.add_argument("--steps", type=int, help="steps under amp_ext")
    parser.add_argument("--torch-steps", type=int, help="steps under torch.amp")
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="stop training after this time"
    )
    parser.add_argument("--out", type=Path, default=Path("demo.png"))
    options = parser.parse_args(argv)
    for name, value in vars(PLANS[options.device]).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    device = torch.device(options.device)
    environment = describe_environment(device)
    where = "{device_name}, torch {torch}".format(**environment)
    print(f"Checkerboard {options.size} x {options.size} in FP16 on {where}")
    legs = [
        Leg(name, training(amp, device, options.size, **SCALER), steps)
        for name, amp, steps in (
            ("amp_ext", "amp_ext", options.steps),
            ("torch.amp", "torch", options.torch_steps),
        )
    ]
    train(legs, options.seconds)
    print(table(legs))
    print(verdict(legs[0]))
    draw(legs, where, options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
