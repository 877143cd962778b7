"""Values of a Python source tree without importing it: what a name in a module stands for, as far as that is fixed.

Covers what engines write argument tables with: literals, names from other modules of the tree, attributes of classes,
`list(X)`, `X.keys()`, `[*X, "more"]`, `X + Y`, `X[0]` and `[member.name.lower() for member in SomeEnum]`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

Scope = dict[str, ast.expr]


class NotStatic(ValueError):
    """The value is known only to a running program."""


class Module:
    """One source file: its assignments, classes and imports by name."""

    def __init__(self, tree: SourceTree, path: Path) -> None:
        self.tree = tree
        self.path = path
        self.body = ast.parse(path.read_text(encoding="utf-8"), filename=str(path)).body
        self.values = assignments(self.body)
        self.classes = {node.name: node for node in self.body if isinstance(node, ast.ClassDef)}
        self.imports = {
            alias.asname or alias.name: (node.module, alias.name)
            for node in self.body
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

    def function(self, name: str) -> ast.FunctionDef:
        """Raises NotStatic when there is none of this name."""
        for node in self.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        raise NotStatic(f"{self.path}: has no function {name}")

    def value(self, node: ast.expr, scope: Scope | None = None) -> Any:
        """What `node` stands for in this module. Sets become sorted lists. Raises NotStatic."""
        return _Evaluation(self, scope or {}).value(node)

    def find_class(self, name: str) -> tuple[Module, ast.ClassDef]:
        """The class `name` and the module that defines it. Raises NotStatic."""
        if name in self.classes:
            return self, self.classes[name]
        return self._imported(name).find_class(self.imports[name][1])

    def named(self, name: str) -> Any:
        """The value of a name at the top of this module. Raises NotStatic."""
        if name in self.values:
            return self.value(self.values[name])
        return self._imported(name).named(self.imports[name][1])

    def attribute(self, class_name: str, name: str) -> Any:
        """`class_name.name` of a class that is visible here. Raises NotStatic."""
        module, definition = self.find_class(class_name)
        values = assignments(definition.body)
        if name not in values:
            raise NotStatic(f"{module.path}: {class_name} sets no {name}")
        return module.value(values[name], values)

    def _imported(self, name: str) -> Module:
        if name not in self.imports:
            raise NotStatic(f"{self.path}: {name} is not set here")
        return self.tree.module(self.imports[name][0])


class SourceTree:
    """`root` is what PYTHONPATH would name: the directory that holds the packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module] = {}

    def module(self, name: str) -> Module:
        """Raises NotStatic when the tree has no such module."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
            if path is None:
                raise NotStatic(f"{self.root}: has no module {name}")
            self._modules[name] = Module(self, path)
        return self._modules[name]


def assignments(body: list[ast.stmt]) -> Scope:
    """Names set once at this level, with the expression. A later assignment wins, as it does when Python runs it."""
    found: Scope = {}
    for node in body:
        if isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
    return found


class _Evaluation:
    """One evaluation in one module; `scope` holds names that win over the module's (a function's or a class's own)."""

    def __init__(self, module: Module, scope: Scope) -> None:
        self._module = module
        self._scope = scope
        self._kinds: dict[type[ast.expr], Callable[[Any], Any]] = {
            ast.Constant: lambda node: node.value,
            ast.List: self._sequence,
            ast.Tuple: self._sequence,
            ast.Set: lambda node: sorted(self._sequence(node)),
            ast.Dict: lambda node: [self.value(key) for key in node.keys if key is not None],
            ast.Name: self._name,
            ast.Attribute: self._attribute,
            ast.BinOp: self._binary,
            ast.UnaryOp: self._minus,
            ast.Call: self._call,
            ast.Subscript: lambda node: self.value(node.value)[self.value(node.slice)],
            ast.ListComp: self._members,
        }

    def value(self, node: ast.expr) -> Any:
        kind = self._kinds.get(type(node))
        if kind is None:
            raise NotStatic(f"{self._module.path}:{node.lineno}: not a fixed value: {ast.unparse(node)}")
        return kind(node)

    def _sequence(self, node: ast.List | ast.Tuple | ast.Set) -> list[Any]:
        values: list[Any] = []
        for item in node.elts:
            if isinstance(item, ast.Starred):
                values += self.value(item.value)
            else:
                values.append(self.value(item))
        return values

    def _name(self, node: ast.Name) -> Any:
        if node.id in self._scope:
            rest = {name: value for name, value in self._scope.items() if name != node.id}
            return _Evaluation(self._module, rest).value(self._scope[node.id])
        return self._module.named(node.id)

    def _attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name):
            return self._module.attribute(node.value.id, node.attr)
        raise self._unknown(node)

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Mult):
            return left * right
        raise self._unknown(node)

    def _minus(self, node: ast.UnaryOp) -> Any:
        if isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        raise self._unknown(node)

    def _call(self, node: ast.Call) -> Any:
        """list(X), X.keys(), and dataclasses.field(default_factory=...): a list, or a lambda without arguments."""
        function = ast.unparse(node.func)
        if function == "list" and len(node.args) <= 1:
            return list(self.value(node.args[0])) if node.args else []
        if isinstance(node.func, ast.Attribute) and node.func.attr == "keys":
            return self.value(node.func.value)
        if function.endswith("field"):
            factory = next((keyword.value for keyword in node.keywords if keyword.arg == "default_factory"), None)
            if isinstance(factory, ast.Lambda):
                return self.value(factory.body)
            if isinstance(factory, ast.Name) and factory.id in ("list", "dict"):
                return [] if factory.id == "list" else {}
        raise self._unknown(node)

    def _members(self, node: ast.ListComp) -> list[str]:
        """`[m.name.lower() for m in SomeEnum]`, and the same with value or without lower."""
        loop, shape = node.generators[0], ast.unparse(node.elt)
        if not (isinstance(loop.iter, ast.Name) and isinstance(loop.target, ast.Name)) or loop.ifs:
            raise self._unknown(node)
        member = loop.target.id
        module, definition = self._module.find_class(loop.iter.id)
        values = assignments(definition.body)
        shapes: dict[str, Callable[[str], Any]] = {
            f"{member}.name": lambda name: name,
            f"{member}.name.lower()": str.lower,
            f"{member}.value": lambda name: module.value(values[name]),
        }
        if shape not in shapes:
            raise self._unknown(node)
        return [shapes[shape](name) for name in values]

    def _unknown(self, node: ast.expr) -> NotStatic:
        return NotStatic(f"{self._module.path}:{node.lineno}: not a fixed value: {ast.unparse(node)}")
