"""Arm's passes before annotation, run in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx.passes.infra.pass_base import PassResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.fx import GraphModule

    Pass = Callable[[GraphModule], PassResult | None]


class _PassError(Exception):
    """A pass that stopped at a graph: which, and why."""


def arm_pass_manager(profile: str) -> Any:
    """Return Arm's pass manager for a TOSA profile such as "TOSA-1.0+INT", with its passes run as one.

    torch's manager, which it is made of, generates the graph's code after each of some fifty passes, of which most
    find nothing to change: four fifths of the time that they take on a graph of ordinary layers (executorch 1.5.1,
    torch 2.13.0).

    Raises:
        ImportError: if executorch's Arm backend is not installed.
    """
    from executorch.backends.arm._passes.arm_pass_manager import ArmPassManager
    from executorch.backends.arm.common.pipeline_config import ArmPassPipelineConfig, LeakyReLULoweringConfig
    from executorch.backends.arm.tosa import TosaSpecification
    from executorch.backends.arm.tosa.compile_spec import TosaCompileSpec

    spec: Any = TosaCompileSpec(TosaSpecification.create_from_string(profile))
    pipeline = ArmPassPipelineConfig.from_dict(spec._get_pass_pipeline_config().to_dict())
    pipeline.leaky_relu = LeakyReLULoweringConfig.TABLE  # quantized, it is one table
    spec.set_pass_pipeline_config(pipeline)

    class InARow(ArmPassManager):
        def __init__(self) -> None:
            super().__init__(spec)
            self.row = _Row()

        def add_pass(self, pipeline_pass: Pass) -> None:
            super().add_pass(pipeline_pass)  # type: ignore[no-untyped-call]
            self.row.passes += [each for each in self.passes if each is not self.row]
            self.passes = [self.row]

    return InARow()


def why_stopped(error: Exception) -> str:
    """Return what an error of the manager says: which pass it was, of what kind, and its message."""
    if isinstance(error.__cause__, _PassError):
        return str(error.__cause__)
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"


class _Row:
    """Passes that are run as one: they read graphs, not code, which the manager generates when all have run."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    def __call__(self, model: GraphModule) -> PassResult:
        modified = False
        for each in self.passes:
            try:
                result = each(model)
            except Exception as error:
                raise _PassError(f"{why_stopped(error)} ({type(each).__name__})") from error
            if result is not None:
                model, modified = result.graph_module, modified or result.modified
        return PassResult(model, modified)
