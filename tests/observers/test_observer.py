"""The observers in the flow: what they see, what they refuse, and what survives copies, checkpoints and training."""

import copy
import io
import math
import pickle
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.testing import assert_close
from torchao.quantization.pt2e.fake_quantize import FakeQuantizeBase
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

from quantmark import (
    BackendQuantizer,
    InputError,
    NonFiniteError,
    UncalibratedError,
    UncalibratedWarning,
    configs,
    freeze,
)
from quantmark.configs import BackendConfig
from quantmark.observers.estimators import HistogramEstimator, MinMaxEstimator
from quantmark.observers.observer import Component, PerChannelRangeObserver, RangeObserver
from quantmark.observers.plan import Cell, Family, Join, JoinInput, Leaf, Plan
from quantmark.observers.qparams import INT8_AFFINE, INT8_SYMMETRIC, QParams, Scheme, choose_qparams
from quantmark.observers.ranges import Bounds, Range
from quantmark.observers.resolution import resolve
from quantmark.observers.rules import BranchRules, JoinRules
from support.flow import (
    calls,
    constant,
    export,
    is_dequantize,
    is_quantize,
    minmax_config,
    observers,
    pair_of,
    quantize,
    sqnr_db,
)


def observer(scheme: Scheme = INT8_AFFINE, **fields: Any) -> RangeObserver:
    cell = Cell(name="x", where="x (relu, in block.act)", scheme=scheme, values=("x",), **fields)
    component = Component(Plan(cells={"x": cell}))
    return RangeObserver(
        scheme.dtype, scheme.quant_min, scheme.quant_max, scheme.qscheme, component=component, cell="x"
    )


def weights(channels: int = 3, **fields: Any) -> PerChannelRangeObserver:
    cell = Cell(name="w", where="w (get_attr)", scheme=INT8_SYMMETRIC, values=("w",))
    scheme = INT8_SYMMETRIC
    return PerChannelRangeObserver(
        scheme.dtype,
        scheme.quant_min,
        scheme.quant_max,
        scheme.channel_qscheme,
        ch_axis=0,
        channels=channels,
        component=Component(Plan(cells={"w": cell})),
        cell="w",
        **fields,
    )


def qparams(found: RangeObserver) -> tuple[float, int]:
    scale, zero_point = found.calculate_qparams()
    return float(scale), int(zero_point)


class Net(nn.Module):
    """Two convolutions, one of them behind a branch that a flag takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU6())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def batches(count: int = 3) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(2, 3, 8, 8, generator=generator) * (i + 1),) for i in range(count)]


X = batches(1)[0]


def prepared(config: BackendConfig | None = None, model: nn.Module | None = None) -> GraphModule:
    config = config or configs.xnnpack()
    model = model or Net()
    if config.is_qat:
        return prepare_qat_pt2e(export(model.train(), X), BackendQuantizer(config))
    return prepare_pt2e(export(model.eval(), X), BackendQuantizer(config))


def calibrate(model: GraphModule, count: int = 3) -> GraphModule:
    with torch.no_grad():
        for batch in batches(count):
            model(*batch)
    return model


def range_observers(model: nn.Module) -> Iterator[RangeObserver]:
    yield from (module for module in model.modules() if isinstance(module, RangeObserver))


def pairs(model: GraphModule) -> list[Any]:
    """The qparams of every quantize op of a converted graph, in order."""
    found: list[Any] = []
    for node in model.graph.nodes:
        if is_quantize(node):
            found.append(pair_of(node))
        elif is_dequantize(node) and "per_channel" in str(node.target):
            found.append([constant(each).tolist() for each in node.args[1:3]])
    return found


# -- qparams from data ----------------------------------------------------------------------------------------


def test_qparams_are_those_of_the_range_seen() -> None:
    found = observer()
    x = torch.tensor([-1.0, 0.5, 1.7])
    assert found(x) is x
    found(torch.tensor([2.0, 0.0]))
    expected = choose_qparams(Range(-1.0, 2.0), INT8_AFFINE)
    assert qparams(found) == (expected.scale, expected.zero_point)
    scale, zero_point = found.calculate_qparams()
    assert (scale.dtype, scale.shape, zero_point.dtype, zero_point.shape) == (torch.float32, (1,), torch.int64, (1,))
    found(torch.tensor([8.0]))
    assert qparams(found)[0] == pytest.approx(9.0 / 255)


def test_qparams_of_a_weight_are_those_of_its_channels() -> None:
    found = weights()
    w = torch.tensor([[1.0, -0.5], [0.0, 0.0], [-4.0, 2.0]])
    assert found(w) is w
    scale, zero_point = found.calculate_qparams()
    assert_close(scale, torch.tensor([1.0, 4.0, 4.0]) / 127)
    assert zero_point.tolist() == [0, 0, 0]
    found(w * 100.0)  # a weight does not change between batches
    assert_close(found.calculate_qparams()[0], scale, rtol=0, atol=0)


def test_a_weight_in_training_is_observed_anew() -> None:
    found = weights(once=False)
    found(torch.ones(3, 2))
    found(torch.full((3, 2), 0.5))
    assert_close(found.calculate_qparams()[0], torch.full((3,), 0.5 / 127))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_channels_may_run_over_any_axis(axis: int) -> None:
    cell = Cell(name="w", where="w", scheme=INT8_SYMMETRIC, values=("w",))
    found = PerChannelRangeObserver(
        torch.int8,
        -127,
        127,
        torch.per_channel_symmetric,
        ch_axis=axis,
        channels=3,
        component=Component(Plan(cells={"w": cell})),
        cell="w",
    )
    w = (
        torch.tensor([1.0, 2.0, 3.0])
        .view([3 if each == axis else 1 for each in range(3)])
        .expand([3 if each == axis else 2 for each in range(3)])
    )
    found(w)
    assert_close(found.calculate_qparams()[0], torch.tensor([1.0, 2.0, 3.0]) / 127)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_is_observed(dtype: torch.dtype) -> None:
    found = observer()
    found(torch.tensor([-1.5, 3.0], dtype=dtype))
    expected = choose_qparams(Range(-1.5, 3.0), INT8_AFFINE)
    assert qparams(found) == (expected.scale, expected.zero_point)


def test_empty_integer_and_bool_tensors_are_passed_over() -> None:
    found = observer()
    for x in (torch.empty(0, 3), torch.tensor([500]), torch.tensor([True])):
        assert found(x) is x
    assert found.known_range() is None
    found(torch.tensor([0.0, 1.0]))
    found(torch.empty(0))
    assert found.known_range() == Range(0.0, 1.0)


def test_an_empty_batch_does_not_count_in_the_flow() -> None:
    model = prepared()
    expected = pairs(convert_pt2e(calibrate(copy.deepcopy(model))))
    for found in range_observers(model):
        found(torch.empty(0, 3, 8, 8))
    assert pairs(convert_pt2e(calibrate(model))) == expected


# -- refusals -------------------------------------------------------------------------------------------------


def test_convert_before_calibration_names_every_silent_observer() -> None:
    model = prepared(model=nn.ModuleDict({"a": Net()})["a"])
    with pytest.raises(UncalibratedError) as caught:
        convert_pt2e(model)
    message = str(caught.value)
    assert "its observer saw no data. Run calibration batches through the prepared model before convert_pt2e" in message
    for where in ("x (placeholder)", "relu (relu, in first.1)", "(hardtanh, in second.1)"):
        assert message.count(f"\n  {where}") == 1 or where in message
    assert "Observers without data (3)" in message  # the weights are known


def test_only_the_silent_ones_are_named() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.unseen = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.seen(x), self.unseen(y)

    inputs = (torch.randn(2, 4), torch.randn(2, 4))
    model = prepare_pt2e(export(Both().eval(), inputs), BackendQuantizer(minmax_config()))
    for node in observers(model):
        if str(node.args[0]) in {"x", "seen_weight", "linear"}:
            model.get_submodule(str(node.target))(torch.randn(4, 4))
    with pytest.raises(UncalibratedError, match=r"y \(placeholder\)") as caught:
        convert_pt2e(model)
    assert "in seen" not in str(caught.value)
    assert "(linear, in unseen)" in str(caught.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_an_error_that_names_the_node(bad: float) -> None:
    model = calibrate(prepared())
    x = X[0].clone()
    x[0, 0, 0, 0] = bad
    model(x)
    with pytest.raises(NonFiniteError, match=r"^x \(placeholder\): 1 batch\(es\) held NaN or infinity; mend the calib"):
        convert_pt2e(model)


def test_warn_leaves_silent_tensors_float_and_says_so_once() -> None:
    config = replace(configs.xnnpack(), on_uncalibrated="warn")
    model = prepared(config)
    with pytest.warns(UncalibratedWarning) as caught:
        converted = convert_pt2e(model)
    said = [str(w.message) for w in caught if w.category is UncalibratedWarning]
    assert len(said) == len(set(said)) == 3
    assert all(text.startswith("left float: ") and "on_uncalibrated" not in text for text in said)
    assert not any(is_quantize(node) or is_dequantize(node) for node in converted.graph.nodes)
    assert_close(converted(*X), Net().eval()(*X))


def test_warn_goes_by_the_finite_values() -> None:
    config = replace(minmax_config(), on_uncalibrated="warn")
    spoiled = X[0].clone()
    spoiled[0, 0, 0, :2] = torch.tensor([math.nan, math.inf])
    with pytest.warns(
        UncalibratedWarning, match=r"went by the finite values: x \(placeholder\): 1 batch\(es\) held NaN"
    ):
        flow = quantize(Net().eval(), X, config, batches=[(spoiled,), *batches(2)])
    assert sqnr_db(Net().eval()(*X), flow.converted(*X)) > 20


def test_a_weight_with_nan_is_named() -> None:
    model = Net().eval()
    with torch.no_grad():
        model.get_parameter("second.0.weight")[0, 0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"held NaN or infinity"):
        convert_pt2e(calibrate(prepared(model=model)))
    found = weights()
    found.component.on_uncalibrated = "warn"
    found(torch.tensor([[math.nan, 1.0], [math.inf, -2.0], [0.5, 3.0]]))
    assert_close(found.calculate_qparams()[0], torch.tensor([1.0, 2.0, 3.0]) / 127)


# -- copies, checkpoints, devices -----------------------------------------------------------------------------


def test_all_tensors_are_buffers() -> None:
    model = calibrate(prepared())
    for found in range_observers(model):
        for module in found.modules():
            plain = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
            assert plain == []
        assert list(found.parameters()) == []


def test_a_deep_copy_is_independent_and_whole() -> None:
    model = calibrate(prepared(), 1)
    twin = copy.deepcopy(model)
    assert {id(o.component) for o in range_observers(twin)}.isdisjoint(id(o.component) for o in range_observers(model))
    for found in range_observers(twin):
        assert found.component.observers[found.cell.name] is found
        assert all(each in found.component.registry for each in found.component.observers.values())
    before = [o.known_range() for o in range_observers(model)]
    calibrate(twin, 3)
    assert [o.known_range() for o in range_observers(model)] == before
    expected = pairs(convert_pt2e(calibrate(prepared(), 3)))
    assert pairs(convert_pt2e(twin)) == expected
    assert pairs(convert_pt2e(model)) != expected


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_checkpoint_makes_calibration_unnecessary(per_channel: bool) -> None:
    config = configs.xnnpack(per_channel=per_channel)
    model = calibrate(prepared(config))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = prepared(config)
    missing, unexpected = fresh.load_state_dict(torch.load(file, weights_only=True))
    assert (missing, unexpected) == ([], [])
    assert [o.known_range() for o in range_observers(fresh)] == [o.known_range() for o in range_observers(model)]
    assert pairs(convert_pt2e(fresh)) == pairs(convert_pt2e(model))


def test_a_checkpoint_from_before_the_first_batch_changes_nothing() -> None:
    model = prepared()
    model.load_state_dict(prepared().state_dict())
    with pytest.raises(UncalibratedError):
        convert_pt2e(copy.deepcopy(model))
    expected = pairs(convert_pt2e(calibrate(prepared())))
    assert pairs(convert_pt2e(calibrate(model))) == expected


def test_a_checkpoint_overrides_what_was_decided_before() -> None:
    model, other = calibrate(prepared(), 1), calibrate(prepared(), 3)
    before = [o.calculate_qparams()[0].tolist() for o in range_observers(model)]
    model.load_state_dict(other.state_dict())
    after = [o.calculate_qparams()[0].tolist() for o in range_observers(model)]
    assert after == [o.calculate_qparams()[0].tolist() for o in range_observers(other)] != before


def test_an_observer_can_be_pickled_with_all_that_it_decides_with() -> None:
    model = calibrate(prepared())
    for found in range_observers(model):
        twin = pickle.loads(pickle.dumps(found))
        assert twin.component.observers[twin.cell.name] is twin
        assert_close(twin.calculate_qparams(), found.calculate_qparams(), rtol=0, atol=0)


@pytest.mark.parametrize("to", [torch.float64, torch.float16, torch.bfloat16])
def test_a_change_of_dtype_changes_no_range(to: torch.dtype) -> None:
    tiny = Net().eval()
    with torch.no_grad():
        tiny.get_parameter("second.0.weight").mul_(1e-6)  # half precision would round it away
    model = calibrate(prepared(model=tiny))
    before = [o.calculate_qparams() for o in range_observers(model)]
    model.to(to)
    for found, expected in zip(range_observers(model), before, strict=True):
        assert_close(found.calculate_qparams(), expected, rtol=0, atol=0)


def test_a_move_to_another_device_takes_the_state_along() -> None:
    found = observer()
    found(torch.tensor([-1.0, 1.0]))
    moved = copy.deepcopy(found).to("meta")
    assert {buffer.device.type for buffer in moved.buffers()} == {"meta"}
    assert_close(found.to("cpu").calculate_qparams()[0], torch.tensor([2.0 / 255]))


# -- components -----------------------------------------------------------------------------------------------


def related() -> Plan:
    """a root with two branches, a join of one of them with a stranger, and a weight that follows both ends."""
    cells = {
        name: Cell(name=name, where=name, scheme=INT8_AFFINE, values=(name,))
        for name in ("root", "left", "right", "other", "joined", "alone")
    }
    cells["weight"] = Cell(
        name="weight", where="weight", scheme=INT8_SYMMETRIC, values=("w",), follows=frozenset({"root", "alone"})
    )
    family = Family(
        where="root",
        root="root",
        root_is_float=False,
        leaves=(Leaf(cell="left"), Leaf(cell="right")),
        rules=BranchRules(),
    )
    inputs = (JoinInput(cell="right", exclusive=True), JoinInput(cell="other", exclusive=True))
    join = Join(where="joined", output="joined", inputs=inputs, may_float=True, rules=JoinRules())
    return Plan(cells=cells, families=(family,), joins=(join,))


@pytest.mark.parametrize("silent", [None, "root", "alone", "left"])
def test_a_cell_is_assigned_what_the_whole_plan_says(silent: str | None) -> None:
    plan = related()
    component = Component(plan, "warn")
    ranges = {}
    for index, cell in enumerate(plan.cells.values()):
        s = cell.scheme
        each = RangeObserver(s.dtype, s.quant_min, s.quant_max, s.qscheme, component=component, cell=cell.name)
        if cell.name != silent:
            each(torch.tensor([-1.0, 1.0 + index]))
            ranges[cell.name] = Range(-1.0, 1.0 + index)
    whole = resolve(plan, ranges)
    assert component.resolution() == whole
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncalibratedWarning)
        for name, each in component.observers.items():
            expected = whole.assignments.get(name)
            assert each.assignment().qparams == (expected.qparams if expected else None)
    weight = component.observers["weight"].assignment()
    assert (weight.qparams is None) == (silent in {"root", "alone"})


def test_a_new_batch_changes_the_qparams_of_all_that_share_them() -> None:
    plan = related()
    component = Component(plan)
    for cell in plan.cells.values():
        s = cell.scheme
        RangeObserver(s.dtype, s.quant_min, s.quant_max, s.qscheme, component=component, cell=cell.name)
        component.observers[cell.name](torch.tensor([-1.0, 1.0]))
    left, right = component.observers["left"], component.observers["right"]
    assert qparams(left) == qparams(right)
    before = qparams(left)
    right(torch.tensor([-1.0, 1.5]))
    assert qparams(left) == qparams(right) != before


def test_frozen_decisions_stay() -> None:
    found = observer()
    found(torch.tensor([-1.0, 1.0]))
    found.component.freeze()
    before = qparams(found)
    found(torch.tensor([100.0]))
    assert qparams(found) == before


def test_frozen_weights_keep_their_scales_while_they_move() -> None:
    found = weights()
    found.once = False
    found(torch.tensor([[-1.0, 1.0], [2.0, 0.0], [0.5, 3.0]]))
    before = found.calculate_qparams()
    assert freeze(torch.nn.Sequential(found)) == 1
    found(torch.full((3, 2), 30.0))
    assert_close(found.calculate_qparams(), before)


def test_nothing_is_frozen_before_there_is_data() -> None:
    with pytest.raises(UncalibratedError, match="its observer saw no data"):
        freeze(prepared())


@pytest.mark.parametrize("model", [None, torch.nn.Linear(2, 2)])
def test_only_a_prepared_model_can_be_frozen(model: Any) -> None:
    with pytest.raises(InputError, match="freeze takes what prepare_qat_pt2e or prepare_pt2e returned"):
        freeze(model)


def test_a_preset_is_not_overwritten_by_calibration() -> None:
    known = MinMaxEstimator()
    known.fill(Range(-3.0, 5.0))
    cell = Cell(name="x", where="x", scheme=INT8_AFFINE, values=("x",))
    found = RangeObserver(
        torch.int8,
        -128,
        127,
        torch.per_tensor_affine,
        component=Component(Plan(cells={"x": cell})),
        cell="x",
        estimator=HistogramEstimator(),
        preset=known,
    )
    found(torch.tensor([1000.0]))
    assert found.known_range() == Range(-3.0, 5.0)


def test_fixed_qparams_need_no_data() -> None:
    fixed = QParams(1 / 256, -128, INT8_AFFINE)
    found = observer(fixed=fixed)
    assert qparams(found) == (1 / 256, -128)
    found(torch.tensor([math.nan]))
    assert found.trouble() is None
    assert qparams(found) == (1 / 256, -128)


# -- outputs that are known ------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["minmax", "moving_average", "histogram"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 1e-12, 3.0, 1e20])
@pytest.mark.parametrize("upper", [None, 6.0])
def test_the_contract_holds_whatever_a_relu_yields(estimator: Any, value: float, upper: float | None) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return F.relu(y) if upper is None else F.relu6(y)

    model = Constant().eval()
    with torch.no_grad():
        model.conv.weight.zero_()
        assert model.conv.bias is not None
        model.conv.bias.fill_(value)
    x = (torch.rand(1, 1, 4, 4),)
    flow = quantize(model, x, configs.xnnpack(estimator=estimator))
    (clamp,) = calls(flow.converted, "relu", "hardtanh")
    (node,) = clamp.users
    pair = pair_of(node)
    assert pair.zero_point == pair.quant_min
    assert pair.scale >= 2.0**-24
    if upper is not None:
        assert pair.largest <= upper + pair.scale / 2
    expected = model(*x)
    assert (flow.converted(*x) - expected).abs().max() <= max(pair.scale / 2, 1e-5 * abs(value))


def test_a_constant_below_zero_is_zero_behind_a_relu() -> None:
    found = observer(contract=Bounds(0.0, None))
    found(torch.zeros(4))
    scale, zero_point = qparams(found)
    assert zero_point == -128
    assert scale == pytest.approx(1 / 255)


# -- training ---------------------------------------------------------------------------------------------------


def test_training_moves_weights_and_ranges_and_converts_to_what_was_trained() -> None:
    torch.manual_seed(0)
    model = prepared(configs.xnnpack(is_qat=True))
    target = Net().eval()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    losses = []
    for step in range(30):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        loss = F.mse_loss(model(x), target(x))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in parameters)
        assert any(bool(p.grad.abs().sum() > 0) for p in parameters if p.grad is not None)
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    x = batches(1)[0][0]
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, FakeQuantizeBase):
                module.disable_observer()
        expected = model(x)
        actual = convert_pt2e(model)(x)
    assert_close(actual, expected, rtol=0, atol=float(expected.abs().max()) / 255 * 1.01)
    assert (actual - expected).abs().mean() < 0.05 * expected.abs().max() / 255


def test_fake_quantize_rounds_as_the_converted_model_does() -> None:
    model = prepared(configs.xnnpack(is_qat=True))
    calibrate(model)
    for module in model.modules():
        if isinstance(module, FakeQuantizeBase):
            module.disable_observer()
    with torch.no_grad():
        rounded = model(*X)
        for module in model.modules():
            if isinstance(module, FakeQuantizeBase):
                module.disable_fake_quant()
        assert_close(model(*X), Net().train()(*X))
    assert 20 < sqnr_db(Net().train()(*X), rounded) < 60


def test_an_untrained_fake_quantize_is_an_error_too() -> None:
    with pytest.raises(UncalibratedError, match="its observer saw no data"):
        convert_pt2e(prepared(configs.xnnpack(is_qat=True)))


def test_a_checkpoint_of_a_training_can_be_taken_up() -> None:
    config = configs.xnnpack(is_qat=True)
    model = calibrate(prepared(config))
    fresh = prepared(config)
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    assert pairs(convert_pt2e(copy.deepcopy(fresh))) == pairs(convert_pt2e(copy.deepcopy(model)))
    with torch.no_grad():
        assert_close(fresh(*X), model(*X), rtol=0, atol=0)


def test_a_step_of_training_costs_no_more_the_deeper_the_net_per_block() -> None:
    """Each fake-quantize asks for qparams at each step: were all decided anew each time, 8 blocks would cost 64."""

    def seconds(blocks: int) -> float:
        layers = [layer for _ in range(blocks) for layer in (nn.Conv2d(2, 2, 1), nn.ReLU())]
        model = prepare_qat_pt2e(
            export(nn.Sequential(*layers).train(), (torch.randn(1, 2, 4, 4),)),
            BackendQuantizer(configs.xnnpack(is_qat=True)),
        )
        x = torch.randn(1, 2, 4, 4)
        model(x)
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            model(x)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(64) < 20 * seconds(8)
