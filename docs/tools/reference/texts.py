"""Find the texts that an expression may have, by the syntax tree alone.

A text is followed through constants, f-strings, assignments, conditions, parameters with the calls that fill them, and
attributes that a constructor fills. A part that is known only at run time becomes a hole, marked by `hole`. Each text
carries the choices that lead to it, so that an error's code is combined with the remedy of the same branch or call.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from docs.tools.reference.source import Module, Source, called

_MOST = 16  # alternatives of one expression; of more a hole remains
_DEEPEST = 8
_OPEN, _CLOSE = "\x01", "\x02"
HOLE = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")

Choices = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Text:
    """A text with holes, and the choices that lead to it: which branch of which condition, which call."""

    text: str
    choices: Choices = frozenset()

    def taking(self, *choices: tuple[str, str]) -> Text:
        return Text(self.text, self.choices | frozenset(choices))

    @property
    def is_whole(self) -> bool:
        """True if no part of it is known at run time only."""
        return _OPEN not in self.text


def hole(name: str) -> str:
    return f"{_OPEN}{name}{_CLOSE}"


def agree(*choices: Choices) -> Choices | None:
    """Return the choices together; None if they contradict each other."""
    together: dict[str, str] = {}
    for condition, branch in frozenset().union(*choices):
        if together.setdefault(condition, branch) != branch:
            return None
    return frozenset(together.items())


def combined(parts: Sequence[Sequence[Text]]) -> Iterator[tuple[tuple[str, ...], Choices]]:
    """Yield every combination of texts whose choices agree."""
    for each in product(*parts):
        choices = agree(*(part.choices for part in each))
        if choices is not None:
            yield tuple(part.text for part in each), choices


class _Element(ast.expr):
    """The element at `at` of the tuple that an expression gives, which an assignment unpacks."""

    def __init__(self, value: ast.Call, at: int) -> None:
        super().__init__()
        self.value, self.at = value, at


class Texts:
    """Follows expressions through the source.

    follows_parts: a part of an f-string is followed into calls, too, as an error's code needs it. Else it becomes a
    hole unless a constant or an assignment nearby gives it.
    """

    def __init__(self, source: Source, follows_parts: bool = False) -> None:
        self._source = source
        self._follows_parts = follows_parts
        self._found: dict[tuple[ast.expr, int], list[Text]] = {}

    def of(self, module: Module, node: ast.expr, depth: int = 0) -> list[Text]:
        """Return every text that the expression may have; a hole where that is not known."""
        if (node, depth) not in self._found:
            found = list(dict.fromkeys(self._of(module, node, depth)))
            self._found[node, depth] = found if 0 < len(found) <= _MOST else [Text(hole(_label(node)))]
        return self._found[node, depth]

    def _of(self, module: Module, node: ast.expr, depth: int) -> Iterator[Text]:
        if depth > _DEEPEST:
            return
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
            yield Text(str(node.value))
        elif isinstance(node, ast.JoinedStr):
            parts = [self._part(module, each, depth) for each in node.values]
            yield from (Text("".join(texts), choices) for texts, choices in combined(parts))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = [self.of(module, node.left, depth + 1), self.of(module, node.right, depth + 1)]
            yield from (Text("".join(texts), choices) for texts, choices in combined(parts))
        elif isinstance(node, ast.IfExp):
            yield from (each.taking((ast.dump(node.test), "yes")) for each in self.of(module, node.body, depth + 1))
            yield from (each.taking((ast.dump(node.test), "no")) for each in self.of(module, node.orelse, depth + 1))
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            for each in node.values:
                yield from self.of(module, each, depth + 1)
        elif isinstance(node, ast.Name):
            yield from self._of_name(module, node, depth)
        elif isinstance(node, ast.Attribute):
            yield from self._of_attribute(module, node, depth)
        elif isinstance(node, _Element):
            yield from self._of_element(module, node, depth)
        elif isinstance(node, ast.Subscript):
            yield from self._of_table(module, node.value, depth)
        elif isinstance(node, ast.Call):
            yield from self._of_call(module, node, depth)

    def _part(self, module: Module, part: ast.expr, depth: int) -> list[Text]:
        """Return the texts of a part of an f-string; a hole for what is not followed."""
        if not isinstance(part, ast.FormattedValue):
            return self.of(module, part, depth + 1)
        node, gap = part.value, [Text(hole(_label(part.value)))]
        if part.format_spec is not None:
            known = self._source.value_of(module, node.id) if isinstance(node, ast.Name) else None
            if known is None or not isinstance(known[1], ast.Constant):
                return gap
            return [Text(format(known[1].value, _constant(part.format_spec)))]
        if self._follows_parts:
            return self.of(module, node, depth + 1)
        if isinstance(node, ast.Name) and self._is_parameter(module, node):
            return gap
        return (
            self.of(module, node, depth + 1)
            if isinstance(node, ast.Name | ast.Constant | ast.IfExp | ast.Call)
            else gap
        )

    def _is_parameter(self, module: Module, node: ast.Name) -> bool:
        function = module.function(node)
        return function is not None and node.id in _parameters(function)

    # ---- names

    def _of_name(self, module: Module, node: ast.Name, depth: int) -> Iterator[Text]:
        function = module.function(node)
        place: ast.AST = node
        while function is not None:
            values = list(_assignments(module, function, place, node.id))
            for value, choices in values:
                if value is None:
                    yield Text(hole(node.id))
                else:
                    yield from (each.taking(*choices) for each in self.of(module, value, depth + 1))
            if values:
                return
            if node.id in _parameters(function):
                yield from self._of_parameter(module, function, node.id, depth)
                return
            place, function = function, module.function(function)
        constant = self._source.value_of(module, node.id)
        if constant is not None:
            yield from self.of(*constant, depth + 1)

    def _of_parameter(
        self, module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str, depth: int
    ) -> Iterator[Text]:
        literal = self._literal(module, _parameters(function)[name])
        if literal:
            yield from map(Text, literal)
            return
        for calling, call in self.calls_of(module, function):
            value = _argument(function, call, name, is_method=module.class_of(function) is not None)
            choice = (f"call of {module.name}.{function.name}", f"{calling.path}:{call.lineno}:{call.col_offset}")
            if value is not None:
                yield from (each.taking(choice) for each in self.of(calling, value, depth + 1))
            else:
                yield Text(hole(name)).taking(choice)

    def _literal(self, module: Module, annotation: ast.expr | None) -> list[str]:
        """Return the texts of an annotation that is a Literal, or a name for one."""
        if isinstance(annotation, ast.Name):
            known = self._source.value_of(module, annotation.id)
            annotation = known[1] if known is not None else None
        if not isinstance(annotation, ast.Subscript) or _identifier(annotation.value) != "Literal":
            return []
        return [str(each.value) for each in ast.walk(annotation.slice) if isinstance(each, ast.Constant)]

    def calls_of(
        self, module: Module, function: ast.FunctionDef | ast.AsyncFunctionDef
    ) -> Iterator[tuple[Module, ast.Call]]:
        """Yield the calls of a function, or of a method by its name; a private one is called in its module alone."""
        owner = module.class_of(function)
        if owner is not None and function.name == "__init__":
            yield from self.constructions(owner)
            return
        for calling, call in self._source.calls.get(function.name, ()):
            if calling is module or not function.name.startswith("_"):
                known = self._source.definition(calling, function.name) if isinstance(call.func, ast.Name) else None
                if (known is not None and known[1] is function) or (known is None and owner is not None):
                    yield calling, call
                elif known is None and isinstance(call.func, ast.Attribute) and owner is None:
                    continue

    def constructions(self, owner: ast.ClassDef) -> Iterator[tuple[Module, ast.Call]]:
        """Yield the calls that construct a class, or a class that is derived from it."""
        for calling, call in self._source.calls.get(owner.name, ()):
            yield calling, call
        for calling, call in self._source.calls.get("__init__", ()):
            derived = calling.class_of(call)
            if derived is not None and owner.name in {_identifier(base) for base in derived.bases}:
                yield calling, call
        for calling, call in self._source.calls.get("cls", ()):
            if calling.class_of(call) is owner:
                yield calling, call

    # ---- attributes, tables, calls

    def _of_attribute(self, module: Module, node: ast.Attribute, depth: int) -> Iterator[Text]:
        """Follow `self.x`, and `x.y` where the annotation of x names a class of ours."""
        owner: ast.ClassDef | None = None
        if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            owner = module.class_of(node)
        elif isinstance(node.value, ast.Name):
            function = module.function(node)
            annotation = _parameters(function).get(node.value.id) if function is not None else None
            known = self._source.definition(module, _identifier(annotation)) if annotation is not None else None
            if known is not None and isinstance(known[1], ast.ClassDef):
                module, owner = known[0], known[1]
        if owner is not None:
            yield from self._of_field(module, owner, node.attr, depth)
        else:
            yield from self._of_class_constant(node.attr, depth)

    def _of_class_constant(self, name: str, depth: int) -> Iterator[Text]:
        for declaring, value in self._source.class_constants.get(name, ()):
            yield from self.of(declaring, value, depth + 1)

    def _of_field(self, module: Module, owner: ast.ClassDef, name: str, depth: int) -> Iterator[Text]:
        for each in owner.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                for statement in ast.walk(each):
                    if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                        for value in _stored(statement, name):
                            yield from self.of(module, value, depth + 1)
            elif isinstance(each, ast.AnnAssign) and _identifier(each.target) == name and "ClassVar" in ast.dump(each):
                yield from self._of_class_constant(name, depth)
            elif isinstance(each, ast.AnnAssign) and _identifier(each.target) == name:
                yield from self._of_data_field(owner, name, each.value, depth)
            elif isinstance(each, ast.Assign) and any(_identifier(target) == name for target in each.targets):
                yield from self.of(module, each.value, depth + 1)
        for base in owner.bases:
            known = self._source.definition(module, _identifier(base))
            if known is not None and isinstance(known[1], ast.ClassDef):
                yield from self._of_field(known[0], known[1], name, depth + 1)

    def _of_data_field(self, owner: ast.ClassDef, name: str, default: ast.expr | None, depth: int) -> Iterator[Text]:
        fields = [
            each.target.id
            for each in owner.body
            if isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            and "ClassVar" not in ast.dump(each)
        ]
        for calling, call in self.constructions(owner):
            at = fields.index(name)
            named = next((each.value for each in call.keywords if each.arg == name), None)
            value = named or (call.args[at] if at < len(call.args) else default)
            choice = (f"call of {owner.name}", f"{calling.path}:{call.lineno}:{call.col_offset}")
            if value is not None:
                yield from (each.taking(choice) for each in self.of(calling, value, depth + 1))

    def _of_table(self, module: Module, table: ast.expr, depth: int) -> Iterator[Text]:
        """Follow `TABLE[key]`: every value of a dict that is a constant."""
        known = self._source.value_of(module, table.id) if isinstance(table, ast.Name) else None
        if known is not None and isinstance(known[1], ast.Dict):
            for value in known[1].values:
                yield from self.of(known[0], value, depth + 1)

    def _of_element(self, module: Module, element: _Element, depth: int) -> Iterator[Text]:
        """Follow an element of a tuple that `TABLE.get(key, default)` returns."""
        get = element.value
        known = (
            self._source.value_of(module, _identifier(get.func.value)) if isinstance(get.func, ast.Attribute) else None
        )
        table = [_of_keys(each) for each in known[1].values] if known and isinstance(known[1], ast.Dict) else []
        owners = [*((known[0], each) for each in table if known is not None), (module, get.args[1])]
        for number, (owner, each) in enumerate(owners):
            if isinstance(each, ast.Tuple):
                choice = (ast.dump(get), str(number))
                yield from (text.taking(choice) for text in self.of(owner, each.elts[element.at], depth + 1))
            else:
                yield Text(hole(_label(get)))

    def _of_call(self, module: Module, call: ast.Call, depth: int) -> Iterator[Text]:
        if called(call) == "replace" and isinstance(call.func, ast.Attribute) and len(call.args) == 2:
            before, after = (each.value for each in call.args if isinstance(each, ast.Constant))
            for each in self.of(module, call.func.value, depth + 1):
                yield Text(each.text.replace(str(before), str(after)), each.choices)
        elif isinstance(call.func, ast.Name):
            known = self._source.definition(module, call.func.id)
            if known is not None and isinstance(known[1], ast.FunctionDef):
                yield from self._of_result(*known, call, module, depth)

    def _of_result(
        self, module: Module, function: ast.AST, call: ast.Call, calling: Module, depth: int
    ) -> Iterator[Text]:
        """Follow a function that does nothing but return a text; its parameters are those of this call."""
        assert isinstance(function, ast.FunctionDef)
        returns = [each.value for each in ast.walk(function) if isinstance(each, ast.Return)]
        if len(returns) != 1 or returns[0] is None:
            return
        own = f"call of {module.name}.{function.name}"
        here = f"{calling.path}:{call.lineno}:{call.col_offset}"
        for each in self.of(module, returns[0], depth + 1):
            taken = dict(each.choices).get(own)
            if taken in (None, here):
                yield Text(each.text, frozenset((key, at) for key, at in each.choices if key != own))


def _of_keys(value: ast.expr) -> ast.expr:
    """Return the value of a dict's member; of `**dict.fromkeys(keys, value)` the one value of all those keys."""
    return value.args[1] if isinstance(value, ast.Call) and called(value) == "fromkeys" else value


def _constant(text: ast.expr) -> str:
    """Return the text of an f-string without values."""
    parts = text.values if isinstance(text, ast.JoinedStr) else []
    return "".join(str(each.value) for each in parts if isinstance(each, ast.Constant))


def _identifier(node: ast.AST | None) -> str:
    """Return the name that a name or an attribute ends with; of another node nothing."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _label(node: ast.AST | None) -> str:
    """Return the name of a hole: that of the value that fills it, as far as there is one."""
    if isinstance(node, ast.Name):
        return node.id.lstrip("_")
    if isinstance(node, ast.Attribute):
        base = node.value.id if isinstance(node.value, ast.Name) else ""
        name = node.attr.lstrip("_")
        return name if base in ("self", "cls", "") or name not in ("name", "code", "id") else f"{base}.{name}"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Call):
        argument = next((each for each in node.args if isinstance(each, ast.Name | ast.Attribute)), None)
        inner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if called(node) in ("str", "len", "sorted", "join", "list", "round", "max", "min", "type") and node.args:
            return f"number of {_label(node.args[0])}" if called(node) == "len" else _label(node.args[0])
        return _label(argument) if argument is not None else called(node) if inner is None else _label(inner)
    if isinstance(node, ast.BinOp):
        return _label(node.left) if not isinstance(node.left, ast.Constant) else _label(node.right)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    if isinstance(node, ast.Subscript | ast.Starred | ast.FormattedValue | ast.Await | ast.NamedExpr):
        return _label(node.value)
    if isinstance(node, ast.BoolOp):
        return _label(node.values[0])
    if isinstance(node, ast.IfExp):
        return _label(node.body)
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        return _label(node.generators[0].iter)
    if isinstance(node, ast.UnaryOp):
        return _label(node.operand)
    return "value"


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr | None]:
    every = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return {each.arg: each.annotation for each in every}


def _argument(
    function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call, name: str, is_method: bool
) -> ast.expr | None:
    """Return what a call hands over for a parameter, or its default; None where neither can be seen."""
    named = next((each.value for each in call.keywords if each.arg == name), None)
    if named is not None:
        return named
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    is_bound = is_method and not any(_identifier(each) == "staticmethod" for each in function.decorator_list)
    at = names.index(name) - is_bound if name in names else len(call.args)
    if 0 <= at < len(call.args) and not any(isinstance(each, ast.Starred) for each in call.args[: at + 1]):
        return call.args[at]
    defaults: Mapping[str, ast.expr | None] = {
        **dict(zip(reversed(names), reversed(function.args.defaults), strict=False)),
        **dict(zip((each.arg for each in function.args.kwonlyargs), function.args.kw_defaults, strict=True)),
    }
    return defaults.get(name)


def _stored(statement: ast.Assign | ast.AnnAssign, attribute: str) -> Iterator[ast.expr]:
    """Yield what a statement stores in `self.attribute`."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        if isinstance(target, ast.Attribute) and target.attr == attribute and statement.value is not None:
            yield statement.value
        elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            for each, value in zip(target.elts, statement.value.elts, strict=True):
                if isinstance(each, ast.Attribute) and each.attr == attribute:
                    yield value


# ---- which assignment reaches a use

_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
_Reached = tuple[ast.expr | None, tuple[tuple[str, str], ...]]


def _assignments(module: Module, function: ast.AST, use: ast.AST, name: str) -> Iterator[_Reached]:
    """Yield the values of a local name that may reach a use, each with the branches it stands in.

    The last statement before the use that always assigns ends the search. None: assigned, but not by an expression.
    """
    inner: ast.AST = use
    for outer in module.around(use):
        if isinstance(outer, ast.With | ast.For | ast.ExceptHandler) and _binds(outer, name):
            yield None, ()
            return
        comprehensions = outer.generators if isinstance(outer, _COMPREHENSIONS) else ()
        if any(_binds(each, name) for each in comprehensions):
            yield None, ()
            return
        for block in _blocks(outer):
            if inner in block:
                ended = yield from _in_block(block[: block.index(inner)], name)
                if ended:
                    return
        if outer is function:
            return
        inner = outer


def _in_block(statements: Sequence[ast.AST], name: str) -> Generator[_Reached, None, bool]:
    """Yield the values from the last statement back; return True once one of them always assigns."""
    for statement in reversed(statements):
        found = list(_of_statement(statement, name))
        yield from found
        if found and (not isinstance(statement, ast.If) or _always(statement, name)):
            return True
    return False


def _of_statement(statement: ast.AST, name: str) -> Iterator[_Reached]:
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name and statement.value is not None:
                yield statement.value, ()
            elif isinstance(target, ast.Tuple) and name in {_identifier(each) for each in target.elts}:
                yield from _unpacked(target, statement.value, name)
    elif isinstance(statement, ast.If):
        test = ast.dump(statement.test)
        for branch, block in (("yes", statement.body), ("no", statement.orelse)):
            if not _leaves(block):
                yield from ((value, (*choices, (test, branch))) for value, choices in _in_block(block, name))
    elif isinstance(statement, ast.For | ast.While | ast.With | ast.Try):
        if isinstance(statement, ast.For | ast.With) and _binds(statement, name):
            yield None, ()
        for block in _blocks(statement):
            yield from _in_block(block, name)
    elif isinstance(statement, ast.AugAssign) and _identifier(statement.target) == name:
        yield None, ()


def _unpacked(target: ast.Tuple, value: ast.expr | None, name: str) -> Iterator[_Reached]:
    at = [_identifier(each) for each in target.elts].index(name)
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        yield value.elts[at], ()
    elif isinstance(value, ast.IfExp):
        test = ast.dump(value.test)
        for branch, side in (("yes", value.body), ("no", value.orelse)):
            yield from ((each, (*choices, (test, branch))) for each, choices in _unpacked(target, side, name))
    elif isinstance(value, ast.Call) and called(value) == "get" and len(value.args) == 2:
        yield _Element(value, at), ()
    else:
        yield None, ()


def _always(statement: ast.If, name: str) -> bool:
    blocks = [block for block in (statement.body, statement.orelse) if not _leaves(block)]
    return bool(statement.orelse) and all(any(list(_of_statement(each, name)) for each in block) for block in blocks)


def _leaves(block: Sequence[ast.stmt]) -> bool:
    """Return whether a block ends the function or the turn of its loop."""
    return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ExceptHandler):
        return node.name == name
    targets: list[ast.AST] = []
    if isinstance(node, ast.For | ast.comprehension):
        targets = [node.target]
    elif isinstance(node, ast.With):
        targets = [each.optional_vars for each in node.items if each.optional_vars is not None]
    return any(isinstance(each, ast.Name) and each.id == name for target in targets for each in ast.walk(target))


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    names: tuple[str, ...] = ("body", "orelse", "finalbody")
    blocks = [block for each in names if isinstance(block := getattr(node, each, None), list)]
    return [*blocks, *(each.body for each in getattr(node, "handlers", ()))]
