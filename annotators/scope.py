"""Which config applies to which node: the user's rules, from the most specific to the global one.

A rule names nodes by predicate, node or module name, module type or operator type. Precedence, highest first:

    1. predicate          `set_filter`
    2. module name        `set_module_name`: the longer path wins
    3. module type        `set_module_type`: the innermost module wins
    4. operator type      `set_operator_type`
    5. global             the config of the constructor, or `set_global`

Within one level a later call wins over an earlier one.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.fx import GraphModule

from ..observers.errors import ConfigError
from ..observers.fields import require
from ..observers.qparams import Scheme
from .graph import EXPORTED_AS, canonical_name, clean_path, module_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.fx import Node

    from ..configs.base import BackendConfig


@dataclass(frozen=True)
class Rule:
    """One of the user's rules.

    Args:
        kind: "filter", "module name", "module type" or "operator type".
        subject: what the rule was given, as text.
        config: what applies; a scheme stands for the global config with it; None leaves the nodes float.
        depth: node -> how closely the rule names it (larger is closer), or None if it does not.
    """

    kind: str
    subject: str
    config: BackendConfig | Scheme | None
    depth: Callable[[Node], int | None] = field(repr=False, compare=False)


_RANK = {"filter": 4, "module name": 3, "module type": 2, "operator type": 1}


def name_rule(name: str | re.Pattern[str], config: BackendConfig | Scheme | None) -> Rule:
    """Return a rule for the modules of a path and all below them; a pattern must match the whole path.

    A container that is never called itself (`nn.ModuleList`) has a path too.
    """
    is_name = isinstance(name, (str, re.Pattern))
    require(is_name, "set_module_name takes a module's path, or a compiled pattern of one", name)
    wanted = clean_path(name) if isinstance(name, str) else name

    def depth(node: Node) -> int | None:
        paths = {path for called, _ in module_stack(node) for path in _prefixes(called)}
        if isinstance(wanted, str):
            return len(wanted) if wanted in paths else None
        return max((len(path) for path in paths if wanted.fullmatch(path)), default=None)

    return Rule("module name", name if isinstance(name, str) else name.pattern, config, depth)


def _prefixes(path: str) -> list[str]:
    """Return a module path and those of the modules around it.

    >>> _prefixes("layers.0.conv")
    ['', 'layers', 'layers.0', 'layers.0.conv']
    """
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]


def type_rule(module_type: type, config: BackendConfig | Scheme | None) -> Rule:
    """Return a rule for the nodes that come from modules of a type, and from modules inside them."""
    require(isinstance(module_type, type), "set_module_type takes a class, such as nn.Linear", module_type)
    wanted = f"{module_type.__module__}.{module_type.__qualname__}"

    def depth(node: Node) -> int | None:
        kinds = [kind for _, kind in module_stack(node)]
        return max((level for level, kind in enumerate(kinds) if kind == wanted), default=None)

    return Rule("module type", wanted, config, depth)


def operator_rule(operator: object, config: BackendConfig | Scheme | None) -> Rule:
    """Return a rule for an operator: an aten overload, an overload packet, a function of torch, or its canonical name.

    It is looked for in the graph as it is, and as it was exported (in-place ops and clamps are spelled anew).
    """
    takes = "set_operator_type takes an aten operator, a function of torch, or the operator's name"
    require(isinstance(operator, str) or callable(operator), takes, operator)
    is_aten = isinstance(operator, (str, torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    text = str(operator) if is_aten else getattr(operator, "__name__", str(operator))
    name = text.replace("::", ".").removeprefix("aten.").split(".")[0].removesuffix("_copy").rstrip("_")
    exact = not isinstance(operator, str) and hasattr(operator, "_schema")

    def depth(node: Node) -> int | None:
        targets = _targets(node)
        return 0 if (operator in targets if exact else name in map(canonical_name, targets)) else None

    return Rule("operator type", text, config, depth)


def _targets(node: Node) -> list[object]:
    """Return the operator that the node calls, and the one that it was exported with where that is another."""
    if node.op != "call_function":
        return []
    return [node.target, *([node.meta[EXPORTED_AS]] if EXPORTED_AS in node.meta else [])]


def filter_rule(predicate: Callable[[Node], bool], config: BackendConfig | Scheme | None) -> Rule:
    """Return a rule for the nodes that a predicate holds for."""
    require(callable(predicate), "set_filter takes a function of a node", predicate)
    name = getattr(predicate, "__name__", repr(predicate))
    return Rule("filter", name, config, lambda node: 0 if predicate(node) else None)


def _config_of(rule: Rule, default: BackendConfig | None) -> BackendConfig | None:
    """Return the config that a rule stands for."""
    if not isinstance(rule.config, Scheme):
        return rule.config
    if default is None:
        raise ConfigError(
            f"the rule for {rule.kind} {rule.subject!r} is a scheme, which refines the global config, but none is set: "
            "pass a whole config instead"
        )
    return _refined(default, rule.config)


@cache
def _refined(config: BackendConfig, scheme: Scheme) -> BackendConfig:
    """Return a config with another scheme: the same object for the same two."""
    return config.with_scheme(scheme)


class Scope:
    """The user's rules applied to one graph; remembers which of them matched.

    Args:
        default: the global config, or None to leave float whatever no rule names.
        rules: the rules in the order in which they were set.

    Raises:
        ConfigError: if a rule is a scheme, and there is no global config that it could refine.
    """

    def __init__(self, default: BackendConfig | None, rules: Iterable[Rule]) -> None:
        self.default = default
        self.rules = list(rules)
        self.configs = [_config_of(rule, default) for rule in self.rules]
        self.matched: set[int] = set()
        self._known: dict[Node, BackendConfig | None] = {}

    def config_of(self, node: Node) -> BackendConfig | None:
        """Return the config that applies to the node, or None to leave it float."""
        if not self.rules:
            return self.default
        if node not in self._known:
            self._known[node] = self._look_up(node)
        return self._known[node]

    def why_float(self, node: Node) -> str:
        """Return which rule leaves a node float that `config_of` has no config for."""
        index = self._rule_of(node)
        if index is None:
            return "no rule names it, and there is no global config"
        rule = self.rules[index]
        return f"the rule for {rule.kind} {rule.subject!r} leaves it float"

    def _look_up(self, node: Node) -> BackendConfig | None:
        index = self._rule_of(node)
        return self.default if index is None else self.configs[index]

    def _rule_of(self, node: Node) -> int | None:
        """Return the place of the rule that applies to the node, or None where the global config does."""
        best: tuple[int, int, int] | None = None
        for index, rule in enumerate(self.rules):
            depth = rule.depth(node)
            if depth is None:
                continue
            self.matched.add(index)
            key = (_RANK[rule.kind], depth, index)
            best = key if best is None or key > best else best
        return None if best is None else best[2]

    def unmatched(self, model: GraphModule) -> list[str]:
        """Return a message for each rule that named no node, with the nearest names there are."""
        graphs = [each.graph for each in model.modules() if isinstance(each, GraphModule)]
        nodes = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
        rules = [rule for index, rule in enumerate(self.rules) if index not in self.matched]
        rules = [rule for rule in rules if all(rule.depth(node) is None for node in nodes)]  # not another quantizer's
        known: dict[str, set[str]] = {"module name": set(), "module type": set(), "operator type": set()}
        for node in nodes if rules else ():
            known["operator type"] |= {text(each) for each in _targets(node) for text in (str, canonical_name)}
            for path, kind in module_stack(node):
                known["module name"] |= {each for each in _prefixes(path) if each}
                known["module type"].add(kind)
        messages = []
        for rule in rules:
            near = difflib.get_close_matches(rule.subject, sorted(known.get(rule.kind, ())), n=3, cutoff=0.3)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            if rule.kind in {"module name", "module type"} and len(graphs) > 1:
                hint += " (ops in the graphs of cond, scan and while_loop carry no module path)"
            messages.append(f"{rule.kind} {rule.subject!r} matched no node{hint}")
        return messages
