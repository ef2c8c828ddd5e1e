"""`quantmark backends`: the configs, with their rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from .options import backend_config, backend_names, backend_options
from .quiet import quiet

if TYPE_CHECKING:
    from ..configs.base import BackendConfig
    from ..observers.qparams import Scheme


def backends(*, json: bool = False) -> None:
    """List the backends, with the rules and options of each: what it runs quantized, fuses, shares and hoists.

    Args:
        json: every rule of every config, as JSON.
    """
    with quiet():
        names = backend_names()
        found = [backend_config(name) for name in names]
    console = Console()
    if json:
        console.out("[" + ",\n".join(config.to_json() for config in found) + "]", highlight=False)
        return
    for name, config in zip(names, found, strict=True):
        table = Table(box=box.SIMPLE, title=config.name, title_justify="left", title_style="bold", show_header=False)
        for what, rule in _described(config).items():
            table.add_row(what, rule)
        for index, (option, meaning) in enumerate(backend_options(name).items()):
            table.add_row("" if index else "options (--set)", f"{option}  {meaning}")
        console.print(table)


def _described(config: BackendConfig) -> dict[str, str]:
    """Return the rules that matter most, by what they rule."""
    weight, blocks, branches = config.weight, config.blocks, config.branches
    heads = sorted(blocks.heads if blocks.activation_heads is None else blocks.activation_heads)
    clamps, others = sorted(blocks.residual_activations), sorted(blocks.residual_heads)
    per = "per channel" if weight.per_channel else "per tensor"
    convs = f"; in convolutions {_scheme(weight.conv_scheme)}" if weight.conv_scheme else ""
    rules = {
        "activations": f"{_scheme(config.activation.scheme)}, from {config.activation.estimator}",
        "weights": f"{_scheme(weight.scheme)} {per}{convs}",
        "bias": config.bias.kind.value,
        "weighted ops": ", ".join(sorted(blocks.heads)),
        "fused activations": f"{', '.join(sorted(blocks.activations))} into {', '.join(heads)}",
        "fused elsewhere": f"{', '.join(clamps)} into {', '.join(others)}" if clamps and others else "",
        "a fused activation is": "the output's saturation" if blocks.saturation_is_activation else "kept as bounds",
        "other ops quantized": ", ".join(sorted(config.ops.own)),
        "data movement": "quantized" if config.ops.quantize_movement else "float, quantized below",
        "hoist rule": branches.hoist.value,
        "branches, by preference": ", ".join(outcome.value for outcome in branches.outcomes),
        "sharing may cost": f"{branches.max_sharing_loss_db:g} dB, of a computed root {branches.max_root_loss_db:g} dB",
        "joins": ", ".join(outcome.value for outcome in config.joins.outcomes),
    }
    return {what: rule for what, rule in rules.items() if rule}


def _scheme(scheme: Scheme) -> str:
    kind = "symmetric" if scheme.symmetric else "affine"
    return f"{str(scheme.dtype).removeprefix('torch.')} {kind} [{scheme.quant_min}, {scheme.quant_max}]"
