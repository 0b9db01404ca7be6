"""Prints the comparison: loss and margin of every step, then the costs."""

from rich.console import Console
from rich.table import Table

from benchmarks.demo.comparison import LOSS_TOLERANCE, Comparison, Measurements, column


def steps_table(stock: Measurements, fastdpo: Measurements) -> Table:
    """One row per step."""
    table = Table(title="Loss and reward margin by step", title_justify="left")
    for header in ("step", "loss TRL", "fastdpo", "difference", "margin TRL", "fastdpo", "difference"):
        table.add_column(header, justify="right", no_wrap=True)
    values = (column(side, name) for name in ("loss", "margin") for side in (stock, fastdpo))
    for step, (loss, fast_loss, margin, fast_margin) in enumerate(zip(*values, strict=True), start=1):
        table.add_row(
            str(step),
            f"{loss:.6f}",
            f"{fast_loss:.6f}",
            f"{fast_loss - loss:+.1e}",
            f"{margin:.6f}",
            f"{fast_margin:.6f}",
            f"{fast_margin - margin:+.1e}",
        )
    return table


def costs_table(comparison: Comparison) -> Table:
    """One row per cost."""
    table = Table(title="Costs", title_justify="left")
    table.add_column("")
    for header in ("TRL", "fastdpo", "TRL / fastdpo"):
        table.add_column(header, justify="right", no_wrap=True)
    for cost in comparison.costs:
        digits = 3 if cost.unit == "s" else 0
        stock, fastdpo = (f"{value:,.{digits}f} {cost.unit}".strip() for value in (cost.stock, cost.fastdpo))
        table.add_row(cost.name, stock, fastdpo, f"{cost.ratio:.2f}x")
    return table


def print_comparison(console: Console, stock: Measurements, fastdpo: Measurements, comparison: Comparison) -> None:
    console.print()
    console.print(steps_table(stock, fastdpo))
    console.print(
        f"largest difference of the loss    {comparison.loss_difference:.1e} "
        f"(relative: {comparison.loss_relative_difference:.1e}, allowed: {LOSS_TOLERANCE:.0e})\n"
        f"largest difference of the margin  {comparison.margin_difference:.1e}\n",
        highlight=False,
    )
    console.print(costs_table(comparison))
    machine = ", ".join(f"{name} {value}" for name, value in fastdpo["machine"].items())
    packages = ", ".join(f"{name} {version}" for name, version in fastdpo["versions"].items())
    console.print(
        "Times are medians over all steps except the first. Tokens are the mean of policy and reference together,\n"
        f"including padding. Memory is the {stock['memory']}.\n"
        "On a CPU, TRL's head scores every position, on CUDA only the labelled ones: the ratio differs there.\n"
        f"{machine}\n{packages}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
