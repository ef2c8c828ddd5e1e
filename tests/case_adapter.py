"""Our quantizer for a runner of real-world cases: `factory(hints) -> Quantizer`.

Hints are what a case asks for: `act` ("int8", "int16" or "sym8"), `qat`, `per_channel`, `configure` (per-module
requests), `group` and `no_calib`. The backend is one that runs every op quantized and can leave a block float.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantmark import BackendQuantizer
from quantmark.configs import ActivationConfig, BackendConfig, BiasConfig, BiasKind, WeightConfig
from quantmark.observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, INT16_SYMMETRIC
from quantmark.observers.rules import BranchRules, Outcome

SCHEMES = {"int8": INT8_AFFINE, "sym8": INT8_SYMMETRIC, "int16": INT16_SYMMETRIC}


def config(hints: Mapping[str, Any], activation: str) -> BackendConfig:
    """Return the config that the hints ask for."""
    estimator = "moving_average" if hints.get("qat") else "histogram"
    if hints.get("group") == "O":
        # One of these cases asks for an observer that gives up a rare wild value. Nothing but the user's word tells
        # it from a heat map's peak, so it is an option and no default; the other cases of the group must bear it.
        estimator = "percentile"
    return BackendConfig(
        name="cases",
        activation=ActivationConfig(scheme=SCHEMES[activation], estimator=estimator, percent=99.5),  # type: ignore[arg-type]
        weight=WeightConfig(per_channel=hints.get("per_channel", True)),
        bias=BiasConfig(kind=BiasKind.INT32_DERIVED if activation == "int16" else BiasKind.FLOAT),
        branches=BranchRules(outcomes=(Outcome.SHARED, Outcome.INDEPENDENT, Outcome.FLOAT_ROOT)),
        is_qat=bool(hints.get("qat")),
        on_uncalibrated="warn" if hints.get("no_calib") else "error",
    )


def factory(hints: Mapping[str, Any]) -> BackendQuantizer:
    """Return the quantizer that a case asks for."""
    base = config(hints, hints.get("act", "int8"))
    requests = hints.get("configure", ())
    by_type_alone = bool(requests) and all(kind == "type" for kind, *_ in requests)
    quantizer = BackendQuantizer(None if by_type_alone else base)
    for kind, what, activation in requests:
        wanted = config(hints, activation)
        if kind == "name":
            quantizer.set_module_name(what, wanted)
        else:
            quantizer.set_module_type(what, wanted)
    return quantizer
