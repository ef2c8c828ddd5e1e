"""Bodies of scan and while_loop, which torchao prepares with the quantizer of the outer graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan
from torch.fx import GraphModule
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from quantmark import BackendQuantizer, check, configs, observe_ranges, sqnr_db
from quantmark.annotators.quantizer import AnnotationWarning
from quantmark.configs import BackendConfig


class Scans(nn.Module):
    """A recurrent net over the first axis."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.relu(self.a(x) + self.h(state))
            return state, state.clone()

        _, states = scan(step, torch.zeros(x.shape[1], 8), x)
        found: Tensor = self.out(states)
        return found


class Loops(nn.Module):
    """A block that is run three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        def goes_on(count: Tensor, x: Tensor) -> Tensor:  # noqa: ARG001
            return count < 3

        def step(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, torch.relu(self.a(x))

        _, x = while_loop(goes_on, step, (torch.tensor(0), x))
        found: Tensor = self.out(x)
        return found


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "scan": (Scans, (5, 2, 8), {"linear", "linear_1", "relu"}),
    "while_loop": (Loops, (2, 8), {"relu"}),
}


@pytest.mark.parametrize("factory", [configs.xnnpack, configs.cadence, configs.arm_tosa])
@pytest.mark.parametrize("name", MODELS)
def test_the_body_of_a_loop_is_quantized_and_the_program_left_as_it_was(
    name: str, factory: Callable[[], BackendConfig]
) -> None:
    torch.manual_seed(0)
    make, shape, blocks = MODELS[name]
    model, config = make().eval(), factory()
    batches = [torch.randn(shape) for _ in range(4)]
    program = torch.export.export(model, (batches[0],))
    quantizer = BackendQuantizer(config)
    prepared = prepare_pt2e(program.module(), quantizer)
    for batch in batches:
        prepared(batch)
    converted = convert_pt2e(prepared)
    assert [body.blocks.keys() for body in quantizer.record.bodies] in ([blocks], [{"linear"}])
    inner = [graph for name, graph in converted.named_children() if isinstance(graph, GraphModule)]
    assert any("quantize_per_tensor" in str(node.target) for graph in inner for node in graph.graph.nodes)
    assert min(sqnr_db(model(batch), converted(batch)) for batch in batches) > 34
    assert torch.equal(program.module()(batches[0]), model(batches[0]))
    check(converted, config).raise_if_unsafe()
    again = torch.export.export(converted, (batches[0],)).module()
    assert torch.equal(again(batches[0]), converted(batches[0]))


@pytest.mark.parametrize("name", MODELS)
def test_with_ranges_given_beforehand_a_body_stays_float_and_says_so(name: str) -> None:
    torch.manual_seed(0)
    make, shape, _ = MODELS[name]
    model = make().eval()
    batches = [torch.randn(shape) for _ in range(4)]
    program = torch.export.export(model, (batches[0],))
    table = observe_ranges(program, [(batch,) for batch in batches])
    with pytest.warns(AnnotationWarning, match="runs its body in float"):
        converted = convert_pt2e(prepare_pt2e(program.module(), BackendQuantizer(configs.xnnpack(), ranges=table)))
    assert sqnr_db(model(batches[0]), converted(batches[0])) > 34


@pytest.mark.parametrize("name", MODELS)
def test_in_training_a_body_stays_float_and_says_so(name: str) -> None:
    torch.manual_seed(0)
    make, shape, _ = MODELS[name]
    model = make().eval()
    x = torch.randn(shape)
    program = torch.export.export(model, (x,))
    with pytest.warns(AnnotationWarning, match="runs its body in float"):
        prepared = prepare_qat_pt2e(program.module(), BackendQuantizer(configs.xnnpack(is_qat=True)))
    prepared(x)
    assert sqnr_db(model(x), convert_pt2e(prepared)(x)) > 30


class Remembers(nn.Module):
    """A loop whose body reads a buffer that the model writes to."""

    def __init__(self, *, writes_first: bool) -> None:
        super().__init__()
        self.a, self.writes_first = nn.Linear(4, 4), writes_first
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        def goes_on(count: Tensor, x: Tensor) -> Tensor:  # noqa: ARG001
            return count < 2

        def step(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, torch.relu(self.a(x)) + seen

        if self.writes_first:
            self.seen.add_(x.mean(0))
        seen = self.seen
        found: Tensor = while_loop(goes_on, step, (torch.tensor(0), x))[1]
        if not self.writes_first:
            self.seen.add_(x.mean(0))
        return found


@pytest.mark.parametrize("writes_first", [True, False])
def test_a_buffer_that_a_body_reads_is_written_on(writes_first: bool) -> None:
    torch.manual_seed(0)
    model = Remembers(writes_first=writes_first).eval()
    x = torch.randn(2, 4)
    prepared = prepare_pt2e(torch.export.export(model, (x,)).module(), BackendQuantizer(configs.xnnpack()))
    for _ in range(4):
        prepared(x)
    converted = convert_pt2e(prepared)
    buffer = dict(converted.named_buffers())["seen"].zero_()
    wanted = Remembers(writes_first=writes_first).eval()  # with a buffer of its own, as `model` has it no longer
    wanted.load_state_dict(model.state_dict() | {"seen": buffer})
    for _ in range(4):  # the buffer holds another sum at each call
        assert sqnr_db(wanted(x), converted(x)) > 30
