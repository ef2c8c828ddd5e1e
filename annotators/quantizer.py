"""`BackendQuantizer`: what users pass to `prepare_pt2e`. Finds, matches, relates, writes, and keeps the record."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchao.quantization.pt2e.quantizer import Quantizer
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from ..configs.base import BackendConfig, Spectra
from ..configs.rewrites import rewrite
from ..observers.errors import ConfigError, InputError
from ..observers.fields import got, require
from ..observers.qparams import Scheme
from ..observers.table import RangeTable
from .account import Account, account_ops
from .blocks import annotate_head
from .branches import annotate_families, annotate_tree, find_trees, read_branch
from .draft import Draft
from .elementwise import annotate_block_output, annotate_own_output
from .graph import EXPORTED_AS, where
from .hoists import relate_hoists
from .joins import annotate_join, read_join, relate_joins, relate_wishes
from .kept import keep
from .masks import masked_values
from .memory import written_memory
from .neighbours import annotation_of, reconcile
from .nested import (
    conds,
    convert_nested,
    has_while_loop,
    inner_ops,
    is_body,
    keep_bodies_float,
    loops,
    own_bodies,
    prepare_branches,
)
from .roles import Role, Roles, assign_roles
from .scope import Rule, Scope, filter_rule, name_rule, operator_rule, type_rule
from .settle import settle
from .spectra import for_spectrum, small_end, spectrum_values
from .transform import spell_norms, transform
from .validate import validate
from .writer import fresh_spec, mark_inside, write

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from torch.fx import Node
    from torch.fx.graph_module import GraphModule

    from ..observers.observer import Component
    from ..observers.plan import Plan
    from ..observers.rules import Decision
    from .blocks import Block
    from .branches import Trees

_IN_PLACE = (
    "writes in place into memory that is read under another name: all that shares it stays float; "
    "write it out of place to have it quantized"
)


_FOREIGN = "another quantizer had annotated it"
_LOOP = (
    "runs its body in float: a table of ranges says nothing of what happens inside, and torchao enters no loop in "
    "training; calibrate with prepare_pt2e to have it quantized"
)


_COND = (
    "runs its branches in float: a table of ranges says nothing of what happens inside, and torch can't train through "
    "observers there; calibrate with prepare_pt2e to have them quantized"
)


_SPECTRUM = (
    "is a square that feeds a logarithm, a root or a reciprocal, where 8 bits cost 15 to 40 dB; this backend can "
    'neither leave it float nor widen it: quantize with activation="int16", or leave the module float'
)


class AnnotationWarning(UserWarning):
    """Something that the user asked for had no effect, or nothing was quantized at all."""


@dataclass
class Record:
    """What one `annotate` call did.

    Args:
        blocks: the fused blocks, by the name of their output node.
        components: what decides; each holds its decisions once ranges are known.
        settled: decisions that were made at annotation time (ranges first).
        branches: names of the nested graphs (of torch.cond) that were prepared too.
        bodies: the records of loop bodies (of scan and while_loop), which torchao has annotated after the outer graph.
        messages: what the user should know (rules without effect, nothing annotated).
        gone: nodes that the graph lost before it was annotated.
        account: what became of each op, and the cells that were to be decided about.
    """

    blocks: dict[str, Block] = field(default_factory=dict)
    components: list[Component] = field(default_factory=list)
    settled: tuple[Decision, ...] = ()
    branches: list[str] = field(default_factory=list)
    bodies: list[Record] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    gone: frozenset[str] = frozenset()
    account: Account = field(default_factory=Account)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions on branch families and joins, from what was observed so far."""
        mine = self.settled + tuple(d for component in self.components for d in component.resolution().decisions)
        return mine + tuple(decision for body in self.bodies for decision in body.decisions)


class BackendQuantizer(Quantizer):
    """Annotate a graph as one backend's config asks.

    Args:
        config: the backend's config; applies wherever no other rule is set. None leaves float whatever no
            rule names.
        ranges: decide at annotation time from these ranges, and calibrate nothing; None decides in `convert_pt2e`,
            from what the observers saw.

    >>> from quantmark import BackendQuantizer, configs
    >>> quantizer = BackendQuantizer(configs.xnnpack()).set_module_name("head", None)
    """

    def __init__(self, config: BackendConfig | None, ranges: RangeTable | None = None) -> None:
        super().__init__()
        if not isinstance(ranges, RangeTable | None):
            raise InputError(f"BackendQuantizer takes ranges as a RangeTable (see observe_ranges), {got(ranges)}")
        self.config = _config(config)
        self.ranges = ranges
        self.record = Record()
        self._rules: list[Rule] = []
        self._gone: frozenset[str] = frozenset()
        self._nested = False
        self._links: list[tuple[str, ...]] = []
        self._unlinked: list[str] = []

    def set_global(self, config: BackendConfig | None) -> BackendQuantizer:
        """Set the config of whatever no other rule names; None leaves it float."""
        self.config = _config(config)
        return self

    def set_module_name(self, name: str | re.Pattern[str], config: BackendConfig | Scheme | None) -> BackendQuantizer:
        """Set the config of a module path and all below it; a pattern must match the whole path.

        A `Scheme` stands for the global config with that activation scheme; None leaves the modules float.
        """
        return self._add(name_rule(name, _config_or_scheme(config)))

    def set_module_type(self, module_type: type, config: BackendConfig | Scheme | None) -> BackendQuantizer:
        """Set the config of all modules of a type, and of the modules inside them."""
        return self._add(type_rule(module_type, _config_or_scheme(config)))

    def set_operator_type(self, operator: object, config: BackendConfig | Scheme | None) -> BackendQuantizer:
        """Set the config of an operator: an aten overload, an overload packet, or its canonical name."""
        return self._add(operator_rule(operator, _config_or_scheme(config)))

    def set_filter(self, predicate: Callable[[Node], bool], config: BackendConfig | Scheme | None) -> BackendQuantizer:
        """Set the config of the nodes that a predicate holds for."""
        return self._add(filter_rule(predicate, _config_or_scheme(config)))

    def link(self, *names: str) -> BackendQuantizer:
        """Make tensors share one qparams, whatever it costs: names of the nodes that write them.

        `prepare_pt2e` or `convert_pt2e` raises `SharingConflictError` where no qparams serve them all.
        """
        for name in names:
            _require_name("link", name)
        if len(set(names)) < 2:
            raise InputError(
                f"link takes the names of two or more tensors, got {', '.join(map(repr, names)) or 'none'}"
            )
        self._links.append(names)
        return self

    def unlink(self, name: str) -> BackendQuantizer:
        """Keep a tensor's qparams its own: a join that it meets requantizes it, its branches don't share."""
        _require_name("unlink", name)
        self._unlinked.append(name)
        return self

    def _add(self, rule: Rule) -> BackendQuantizer:
        self._rules.append(rule)
        return self

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Spell the graph so that it can be quantized; see `transform.py`."""
        (keep_bodies_float if self._is_qat() else own_bodies)(model)
        before = {node.name for node in model.graph.nodes}
        meta = model.meta
        spell_norms(model, Scope(self.config, self._rules).config_of)
        model = self._rewrite(model)
        transform(model, Scope(self.config, self._rules).config_of)
        for rest in self._rests():
            model = rest.transform_for_annotation(model)
        model.meta = meta  # that of a new module would be lost: torchao hands on the meta of the given one alone
        self._gone = frozenset(before.difference(node.name for node in model.graph.nodes))
        return model

    def _rewrite(self, model: GraphModule) -> GraphModule:
        """Let the backends' own packages take apart what they would otherwise when they lower."""
        if has_while_loop(model):  # executorch 1.5.1: Arm's passes give the counter a dimension, or raise
            return model
        config_of = Scope(self.config, self._rules).config_of
        for name in dict.fromkeys(config.rewrite for config in self._configs() if config.rewrite is not None):
            for node in model.graph.nodes:
                node.meta.setdefault(EXPORTED_AS, node.target)  # rules for an operator hold for its parts
            wanted = [n for n in model.graph.nodes if (c := config_of(n)) is not None and c.rewrite == name]
            model = rewrite(model, name, set(wanted))
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate every node that a config covers and no other quantizer has annotated."""
        convert_nested(model)  # not while graphs are spelled: a later quantizer's passes may refuse a called module
        if not is_body(model):
            return self._annotate(model)
        outer = self.record
        if self.ranges is None:  # a table of ranges says nothing of what happens inside a loop
            model = self._annotate(model)
            outer.bodies.append(self.record)
        self.record = outer
        return model

    def _annotate(self, model: GraphModule) -> GraphModule:
        scope = Scope(self.config, self._rules)
        writes = written_memory(model)
        in_place = {node for shared in writes.values() for node in shared}
        ours_never = _kept_float(model, in_place)
        spectra = spectrum_values(model)

        def config_of(node: Node) -> BackendConfig | None:
            found = None if node in ours_never else scope.config_of(node)
            return for_spectrum(found) if found is not None and node in spectra else found

        draft = Draft(model, config_of if ours_never or spectra else scope.config_of)
        roles = assign_roles(model, draft.config_of)
        trees = draw_up(draft, roles)
        annotate_families(draft, trees, roles)
        relate_joins(draft, trees, roles)
        relate_hoists(draft, roles)
        unknown = relate_wishes(draft, trees, self._links, self._unlinked)
        self.record = Record({n.name: b for n, b in roles.blocks.items()}, gone=self._gone)
        places, plan = draft.places, draft.plan()
        inner = self._nested or is_body(model)  # where names of the outer graph name nothing
        self._note(unknown if not inner else [])
        self._write(draft, roles, plan)
        tuples = Role.TUPLE
        inside = (n for n, role in roles.of.items() if Q_ANNOTATION_KEY not in n.meta and role is not tuples)
        mark_inside({n: roles.configs[n].marker for n in inside})
        mark_inside({n: None for n in in_place if n.op == "call_function"})
        self._annotate_rest(model, scope)
        ops, outputs = account_ops(model.graph.nodes, roles, places, scope, ours_never)
        self.record.account = replace(
            self.record.account,
            ops=ops,
            outputs=outputs,
            plan=plan,
            weights=frozenset(draft.weights),
            biases=frozenset(draft.biases),
        )
        computed = [write for write, shared in writes.items() if all(each.op == "call_function" for each in shared)]
        self._note([f"{where(write)} {_IN_PLACE}" for write in computed])
        narrow = [n for n in sorted(spectra) if (c := roles.configs.get(n)) and c.ops.spectra is Spectra.KEEP]
        self._note([f"{where(node)} {_SPECTRUM}" for node in narrow[:1]])
        within = self._enter_nested(model)
        self._note(scope.unmatched(model) if not inner else [])
        if not within and not any(annotation_of(node) for node in model.graph.nodes):
            self._note([f"no operator was annotated: nothing will be quantized{inner_ops(model)}"])
        keep(model, self)
        if _FOREIGN in ours_never.values():
            self.validate(model)  # torchao's ComposableQuantizer asks none of its quantizers to
        return model

    def _enter_nested(self, model: GraphModule) -> bool:
        """Prepare the branches of conds; tell if nested graphs are quantized (they say so themselves if not)."""
        if self.ranges is not None or self._is_qat():
            self._note([f"{where(loop)} {_LOOP}" for loop in loops(model)])
            self._note([f"{where(cond)} {_COND}" for cond in conds(model)])
            return False
        self.record.branches = prepare_branches(model, self._again)
        return bool(self.record.branches or loops(model))

    def _write(self, draft: Draft, roles: Roles, plan: Plan) -> None:
        if self.ranges is None:
            self.record.components = write(draft, plan)
        else:
            settled = settle(draft, roles, plan, self.ranges, self._gone)
            self.record.settled = settled.resolution.decisions
            self.record.account = Account(assignments=settled.resolution.assignments, ranges=settled.ranges)
            self.record.components = write(draft, settled.plan, settled.presets)

    def _annotate_rest(self, model: GraphModule, scope: Scope) -> None:
        """Let the configs' `rest` annotate what is left, and tie it to ours."""
        for rest in self._rests():
            ours = {node: annotation for node in model.graph.nodes if (annotation := annotation_of(node))}
            rest.annotate(model)
            for node, annotation in ours.items():
                node.meta[Q_ANNOTATION_KEY] = annotation  # whatever the other quantizer thought of it
            reconcile(model, set(ours), lambda node: fresh_spec(node, self._near(node, scope)))

    def _again(self) -> BackendQuantizer:
        """Return a quantizer with the same rules for a graph within the graph."""
        twin = BackendQuantizer(self.config)
        twin._rules, twin._nested = self._rules, True
        twin._links, twin._unlinked = self._links, self._unlinked
        return twin

    def _near(self, node: Node, scope: Scope) -> BackendConfig:
        """Return the config of a node that `rest` annotated: its own, or else the nearest there is."""
        return scope.config_of(node) or self._configs()[0]

    def _is_qat(self) -> bool:
        return any(config.is_qat for config in self._configs())

    def _configs(self) -> list[BackendConfig]:
        """Return the global config and those of the rules."""
        scope = Scope(self.config, self._rules)
        return [each for each in (scope.default, *scope.configs) if each is not None]

    def _rests(self) -> list[Quantizer]:
        """Return the quantizers that the configs name for whatever they leave, each once."""
        found = [config.rest for config in self._configs() if config.rest is not None]
        return list({id(rest): rest for rest in found}.values())

    def _note(self, messages: list[str]) -> None:
        for message in messages:
            self.record.messages.append(message)
            warnings.warn(message, AnnotationWarning, stacklevel=4)

    def validate(self, model: GraphModule) -> None:
        """Raise a named error for an annotation, ours or another quantizer's, that can't work; see `validate.py`."""
        record = Record() if is_body(model) else self.record
        validate(model, record, Scope(self.config, self._rules).config_of)


def _require_name(method: str, name: object) -> None:
    require(isinstance(name, str), f"{method} takes names of nodes, as text", name)


def _config_or_scheme(given: BackendConfig | Scheme | None) -> BackendConfig | Scheme | None:
    return given if isinstance(given, Scheme) else _config(given)


def _config(given: BackendConfig | None) -> BackendConfig | None:
    """Return what was given as a config, if it is one."""
    if isinstance(given, BackendConfig | None):
        return given
    raise ConfigError(f"a quantizer takes a config such as configs.xnnpack(), or None to leave ops float; {got(given)}")


def _kept_float(model: GraphModule, in_place: set[Node]) -> dict[Node, str]:
    """Return the nodes that are not ours to quantize, whatever the rules say, and why."""
    masks = masked_values(model)
    kept = dict.fromkeys(
        (reader for mask in masks for reader in mask.users), "it reads a mask, which no qparams describe"
    )
    kept |= dict.fromkeys(masks, "it carries a mask, which no qparams describe")
    kept |= dict.fromkeys(
        in_place, "it writes in place into memory that is read under another name, or reads such memory"
    )
    marked = (node for node in model.graph.nodes if Q_ANNOTATION_KEY in node.meta)
    return kept | dict.fromkeys((node for node in marked if annotation_of(node)), _FOREIGN)


def draw_up(draft: Draft, roles: Roles) -> Trees:
    """Put every place of the graph in a cell: outputs first, then movement, then what ops read."""
    block, own, join = Role.BLOCK, Role.OWN, Role.JOIN
    for node, role in roles.of.items():
        config = roles.configs[node]
        if role is block:
            annotate_block_output(draft, roles.blocks[node], config)
        elif role is own:
            annotate_own_output(draft, node, config)
        elif role is join:
            annotate_join(draft, node, roles)
    trees = find_trees(roles)
    for tree in trees.by_root.values():
        annotate_tree(draft, tree, roles)
    for node, role in roles.of.items():
        config = roles.configs[node]
        if role is block:
            _read_block(draft, roles.blocks[node], trees, roles)
        elif role is own:
            _read_operands(draft, node, trees, roles, config)
        elif role is join:
            read_join(draft, node, roles)
    return trees


def _read_block(draft: Draft, block: Block, trees: Trees, roles: Roles) -> None:
    config = roles.configs[block.head]
    if block.rule is None:
        _read_operands(draft, block.head, trees, roles, config)
    else:
        annotate_head(draft, block, block.rule, config, lambda value, node: _read(draft, trees, value, node, config))


def _read_operands(draft: Draft, node: Node, trees: Trees, roles: Roles, config: BackendConfig) -> None:
    headroom = config.table_headroom
    for value in roles.read_by(node):
        cell = draft.cells[_read(draft, trees, value, node, config)]
        if headroom is not None and small_end(node) is value:
            cell.headroom = min(headroom, cell.headroom or headroom)


def _read(draft: Draft, trees: Trees, value: Node, reader: Node, config: BackendConfig) -> str:
    segment = trees.segment(value)
    if segment is not None:
        return read_branch(draft, segment, value, reader, config)
    return draft.read(value, reader, config)
